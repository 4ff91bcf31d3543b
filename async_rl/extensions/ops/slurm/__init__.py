"""A run on a Slurm cluster: ``async-rl slurm CONFIG`` writes two batch scripts, and submits them with ``--submit``.

``learner.sbatch`` is a job with the queue server and the learner's ranks, which is requeued as a whole.
``generators.sbatch`` is an array of jobs with a generator each, because Slurm allows no array inside a heterogeneous
job. Its jobs find the queue server by ``queue.json`` in the run directory, which lies on a shared file system. People
edit the scripts, so these decide everything that happens on the cluster; ``jobs.py`` fills the templates in
``templates/`` and calls ``sbatch``. The caller is ``commands.py`` of this extension.
"""
