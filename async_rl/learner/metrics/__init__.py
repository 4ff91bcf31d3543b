"""What the learner writes down about a step. Nothing here changes the training.

In: a ``StepResult``, the queue's answer to the ack, the clock. Out: a row of ``metrics.jsonl``, a line of the step log
(which groups were trained), sampled rollouts as text. The trainer calls ``recorder.StepRecorder``, which uses the rest.
"""
