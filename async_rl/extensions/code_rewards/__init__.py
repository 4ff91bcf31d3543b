"""The reward ``code``: it runs the programs that a model writes on the tests of their rows.

``reward`` finds the program (``fences``) and has it judged by the tests of the row (``row_tests``), in HumanEval's form
by ``check_function``. Programs run in this machine's ``sandbox``, where ``program`` runs each, or at an ``async-rl
verifier`` (``verifier``). ``rows`` reads tests when data is loaded, and ``checks`` looks at a machine before a start.
Generators and evaluations build the reward, by ``rewards.registry``.
"""
