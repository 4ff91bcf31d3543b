"""What the user is told about the run's groups: why it can't go on, what is wrong with it, and how its data ended.

All functions read a ``QueueState`` at the time of its clock and change nothing.
"""

from __future__ import annotations

from async_rl.queue.core.failures import failed_line
from async_rl.queue.core.learning_signal import describe
from async_rl.queue.core.state import QueueState


def why_ended(state: QueueState) -> str:
    """Return what became of the prompts of data that has ended, and if none was trained, what to do."""
    groups, flaws = state.ledger.groups, state.signal.flaws
    amounts = {
        "trained": groups.done,
        f"filtered ({flaws['wrong']} with only wrong answers, {flaws['right']} with only right ones)": (
            groups.filtered
        ),
        "longer than sampling.max_prompt_tokens": state.prompts_too_long,
        "failed queue.max_attempts times": groups.dropped["poison"],
        "too slow queue.max_attempts times": groups.dropped["too_slow"],
        "in skipped steps": groups.dropped["step_skipped"],
    }
    listed = ", ".join(f"{amount} {what}" for what, amount in amounts.items() if amount)
    sentences = [f"the data has ended (data.epochs); prompts: {listed or 'none'}"]
    if not groups.done:
        said = notes(state)
        streak = state.signal.streak
        if streak.num_groups and streak.noted_as not in said:
            sentences.append(describe(streak, state.settings))
        sentences += said.values()
        sentences += ["The generators' logs say why prompts failed"] if groups.dropped["poison"] else []
    return ". ".join(sentences)


def notes(state: QueueState) -> dict[str, str]:
    """Return what the user should know about the run's groups, by cause. Empty if there is nothing."""
    quarantines = {f"quarantine: {why}": why for why in state.quarantines.values()}
    return {**state.signal.notes, **_too_slow_note(state), **_bytes_note(state), **_failure_notes(state), **quarantines}


def _failure_notes(state: QueueState) -> dict[str, str]:
    """Return what fails at present, and where rollouts have failed."""
    failed = {f"failed: {place}": failed_line(failed_place) for place, failed_place in state.failed_places.items()}
    if (outage := state.retries.outage) is not None:
        return {**failed, "outage": outage.describe(state.now, state.settings.queue.max_outage_s)}
    quarantined = {entry.generator_id: entry.why_failing(state.now) for entry in state.generators.alive(state.now)}
    return {**failed, **{f"quarantined: {name}": why for name, why in quarantined.items() if why}}


def _too_slow_note(state: QueueState) -> dict[str, str]:
    slow, settings = state.ledger.groups.dropped["too_slow"], state.settings
    if not slow:
        return {}
    waits = settings.queue.on_stale == "wait"
    remedy = "raise queue.wait_s" if waits else 'set queue.on_stale = "wait", with which steps wait for them'
    text = (
        f"{slow} prompt{'s were' if slow > 1 else ' was'} excluded as too slow: {settings.queue.max_attempts} times "
        f"(queue.max_attempts) all tokens of the answers were older than queue.max_staleness = "
        f"{settings.queue.max_staleness} allows when they arrived. What takes long, such as slow tools and long "
        f"answers, is missing from the training. Raise queue.max_staleness, or {remedy}"
    )
    return {"too_slow": text}


def _bytes_note(state: QueueState) -> dict[str, str]:
    if not state.is_short_of_bytes:
        return {}
    settings = state.settings
    text = (
        f"generators wait for room in the queue: queue.max_bytes = {settings.queue.max_bytes}, and each group in "
        f"flight reserves its largest size, {settings.reserved_bytes} bytes. For the full effect of "
        f"queue.max_staleness = {settings.queue.max_staleness} raise queue.max_bytes to {settings.bytes_for_bound}, "
        f"or lower sampling.max_new_tokens"
    )
    return {"bytes": text}
