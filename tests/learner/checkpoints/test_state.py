"""The trainer's state survives a checkpoint, and a restart forks it."""

from async_rl.learner.checkpoints.files import TrainerState


def test_state_survives_plain_data():
    state = TrainerState(
        step=3, version=2, lineage="a", digests={1: ("x",), 2: ("y",)}, pending_evals=[("held_out", 2)]
    )
    assert TrainerState.from_plain(state.to_plain()) == state


def test_a_restart_gets_a_lineage_of_its_own_with_its_parent_and_fork_version():
    state = TrainerState(step=3, version=2, lineage="a")
    fork = state.fork()
    assert fork.lineage not in ("", "a")
    assert (fork.parent_lineage, fork.fork_version, fork.step) == ("a", 2, 3)
    assert (state.is_resumed, fork.is_resumed, TrainerState().fork().is_resumed) == (False, True, False)


def test_weights_that_a_restart_laid_out_anew_are_known_by_both_digests():
    state = TrainerState(version=2, digests={2: ("old",)})
    for digest in ("new", "new"):
        state.add_digest(2, digest)
    assert state.digests == {2: ("old", "new")}
