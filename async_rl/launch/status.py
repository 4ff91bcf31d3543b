"""``async-rl status``: ask a queue server for the status of its run, and print the status as tables or as JSON.

``live_view`` uses ``ask_status``, too. The status is a JSON object with step, generators, leases, ledger and waits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from async_rl.config.loading import load_run_config
from async_rl.errors import AddressError, QueueError, RunError
from async_rl.learner.checkpoints.mirror import mirror_line
from async_rl.net.keys import ClientKeys, client_keys_of
from async_rl.output import size_text
from async_rl.process.child import is_alive
from async_rl.queue.messages import DOCTOR
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import ETA_STEPS, eval_accuracies, is_step_row, step_figures, who_waits
from async_rl.run.lock import holder_of
from async_rl.run.queue_files import QueueRecord, read_record
from async_rl.run.records.starts import first_steps, warm_steps
from async_rl.run.records.step_log import iter_metrics, last_step, newest_metrics
from async_rl.terminal import visible, visible_values

_LABELS = {
    "lineage": "lineage (learner start)",
    "version": "version of the learner",
    "learner_alive": "learner is alive",
    "learner_trouble": "problem of the learner",
    "newest_step": "figures of the newest step",
    "who_waits": "who waits for whom",
    "depth": "groups ready",
    "prompts_too_long": "prompts too long",
    "filtered_since_step": "filtered since the last step",
    "stop": "why the run stops",
    "storage_full": "waits for room",
    "damaged_groups": "damaged groups, sampled again",
    "journal_damage": "damage of the journal",
    "address": "queue server",
    "relay": "relay of agents",
    "pid": "its process id",
    "malformed": "malformed messages",
    "limited": "messages above the rate limit",
    "refused_handshakes": "refused handshakes",
    "closed_connections": "connections above a limit",
}
"""The label that the table shows for a key of the status, if it is not the key's own words. The table's rows are in
this order; other keys come after them.
"""
_ONLY_IF_ANY = frozenset({
    "prompts_too_long", "filtered_since_step", "damaged_groups", "malformed", "limited", "refused_handshakes",
    "closed_connections", "relay",
})  # fmt: skip
_OF_THE_RUN = ("run_id", "lineage", "step", "version", "training_notes", "group_notes", "excluded")
"""The keys of ``ledger.json`` that are no counts."""
_MAX_GENERATORS = 24
"""Most generators, and most waits, that get a line each."""
_MAX_IDS = 4
"""Most generators that are named on a line that they share."""
_AWAITED = {"take": "groups", "lease": "a lease", "hello": "a learner", "await_eval": "an evaluation"}
"""What the sender of a request waits for until the queue server replies, by the type of the request."""


def ask_status(
    address: str, timeout_s: float, keys: ClientKeys | None = None, *, lift: str | None = None
) -> dict[str, Any]:
    """Return the status of the run whose queue server is at ``address``. The request uses a new connection.

    If ``lift`` names a generator, lift its quarantine before.

    Raises:
        QueueError: the server did not answer within ``timeout_s`` seconds.
        RunError: the quarantine is not lifted: the generator has none, or the key is not the learner's.
    """
    from async_rl.queue.client.clients import LearnerQueue

    with closing(LearnerQueue(address, timeout_s, keys)) as queue:
        if lift is not None:
            lineage = queue.status()["lineage"] or ""
            try:
                queue.quarantine(lineage, lift, reason="")
            except QueueError as error:
                raise RunError(f"--lift-quarantine: {error}") from error
        return queue.status()


def status_at(address: str, timeout_s: float, keys: ClientKeys | None, *, lift: str | None = None) -> dict[str, Any]:
    """Return the status of the run whose queue server is at ``address``, for ``async-rl status --connect``. ``lift`` is
    that of ``ask_status``.

    Raises:
        AddressError: no queue server answered within ``timeout_s`` seconds. The message says how to find the cause.
    """
    try:
        return ask_status(address, timeout_s, keys, lift=lift)
    except QueueError as error:
        raise AddressError(
            f"{error}. Compare the address with queue.json in the run directory, and check that the run has not ended"
        ) from error


def status_of_run(path: Path, timeout_s: float, keys: ClientKeys | None, *, lift: str | None = None) -> dict[str, Any]:
    """Return the status of the run in the directory ``path``.

    The run's queue server is asked. If the run is finished, the status is read from the run's ``ledger.json``.

    Args:
        keys: the keys for the request. If None, the keys in the run's config are used.
        lift: as in ``ask_status``. A finished run has no quarantines to lift.

    Raises:
        RunError: ``path`` is not a run directory, the run's queue server has not started yet or has stopped with the
            rest of the run, or its ``ledger.json`` is damaged.
        AddressError: the queue server did not answer within ``timeout_s`` seconds.
    """
    run_dir = RunDir(path)
    changes = [line for change in read_changes(run_dir) for line in change.lines]
    newest = newest_metrics(run_dir.metrics)
    accuracy = {name: share for row in newest for name, share in eval_accuracies(row).items()}
    rows = list(filter(is_step_row, newest))
    figures = dict(figure for subject in step_figures(rows[-1]) for figure in subject) if rows else {}
    steps = rows[-ETA_STEPS:]
    if run_dir.is_finished:  # the figure of report and compare
        steps = warm_steps(list(filter(is_step_row, iter_metrics(run_dir.metrics))), first_steps(run_dir))
    of_files = {"mirror": mirror_line(run_dir), "changes": changes, "accuracy": accuracy, "newest_step": figures}
    of_files["who_waits"] = who_waits(steps)
    from_files = {key: text for key, text in of_files.items() if text}
    if run_dir.is_finished and lift is None and (ledger := run_dir.read_ledger()):
        of_ledger = {key: ledger.pop(key) for key in _OF_THE_RUN if key in ledger}
        return {**of_ledger, "num_steps": of_ledger.get("step"), "finished": True, **from_files, "ledger": ledger}
    record = read_record(path)
    if record is None:
        raise RunError(
            f"expected a run directory with a queue.json, but {path} has none; correct the path, wait until the run "
            f"has started, or pass --connect ADDRESS"
        )
    if _has_stopped(run_dir, record):
        raise RunError(
            f"the run in {path} has stopped, and none of its processes is alive. {_last_state(run_dir)}; the command "
            f"or call that started it goes on from there, and {run_dir.logs} has its logs"
        )
    if keys is None and run_dir.config.exists():
        keys = client_keys_of(load_run_config(run_dir.config).queue.keys)
    try:
        return {**ask_status(record.address, timeout_s, keys, lift=lift), **from_files}
    except QueueError as error:
        raise AddressError(
            f"the queue server of the run in {path}, at {record.address}, did not answer within {timeout_s:g} s: it "
            f"has ended, or can't be reached from here. {_last_state(run_dir)}; read the logs in {run_dir.logs}, or "
            f"start the run again"
        ) from error


def _has_stopped(run_dir: RunDir, record: QueueRecord) -> bool:
    """Return whether the processes of the run, all on this machine, have ended. False if that can't be known."""
    holder = holder_of(run_dir.lock)
    is_here = urlsplit(record.address).hostname == "127.0.0.1" and holder is not None and not holder.may_live
    return is_here and not is_alive(record.pid)


def _last_state(run_dir: RunDir) -> str:
    """Return how far an unfinished run has come, from its files."""
    steps = last_step(run_dir.metrics)
    mirror = f". The mirror {line}" if (line := mirror_line(run_dir)) else ""
    return f"The run has made {steps} steps, and its newest checkpoint is {run_dir.latest_checkpoint or 'none'}{mirror}"


def why_not_alive(status: Mapping[str, Any], name: str) -> str:
    """Return why a process of the run does not count as alive, as the queue server sees it; empty if it does.

    When the run is finished, all of them count as alive: none has to be started again.

    Args:
        name: ``queue``, ``learner`` or a generator's id. The queue server is alive, because it gave the status.
    """
    if status.get("finished") or name == "queue":
        return ""
    if name == "learner":
        if status.get("learner_alive"):
            return ""
        was = "none has connected yet" if status.get("step") is None else "it has ended, or sends nothing"
        return f"the learner is not alive: {was}; read its log"
    generators = {generator["id"]: generator for generator in status.get("generators", ())}
    if name not in generators:
        ids = ", ".join(sorted(generators)[:_MAX_IDS]) or "none"
        return (
            f"generator {name} has not connected. The queue server knows {len(generators)}: {ids}; read its log, and "
            f"give it this id with `async-rl generator --id`"
        )
    if generators[name]["alive"]:
        return ""
    return (
        f"generator {name} is not alive: it has sent nothing for {generators[name]['seen_s_ago']:.0f} s; read its log"
    )


def print_alive(status: Mapping[str, Any], name: str) -> None:
    """Print whether a process of the run is alive; exit with code 1 if it is not. ``name`` as in ``why_not_alive``."""
    if why := why_not_alive(status, name):
        sys.stderr.write(visible(f"async-rl: {why}\n"))
        raise SystemExit(1)
    sys.stdout.write(visible(f"{name}: {'the run is finished' if status.get('finished') else 'alive'}\n"))


def print_status(status: Mapping[str, Any]) -> None:
    """Print the status of a run as tables."""
    console = Console(markup=False, emoji=False)
    for table in status_tables(visible_values(status)):
        console.print(table)


def status_tables(status: Mapping[str, Any]) -> list[Table]:
    """Return the tables that show a status: the run, its generators, the queue's counts, and the waiting processes.

    Keys that this version of async-rl does not know are shown under their names in the status.
    """
    rest = dict(status)
    run = Table(title="run", title_justify="left", show_header=False)
    tables = [run]
    for label, text in _run_rows(rest):
        run.add_row(label, text)
    generators = rest.pop("generators", [])
    if not any(g.get("alive", True) and g.get("backend") != DOCTOR for g in generators) and not status.get("finished"):
        run.add_row("generators", "no generator is connected")
    if generators:
        tables.append(_generators_table(generators))
        if troubles := generator_troubles(generators):
            tables.append(_table("problems of generators", ("id", "problem"), by_trouble(troubles).items()))
    tables += _ledger_tables(rest.pop("ledger", {}))
    if waits := rest.pop("waits", None):
        tables.append(_table("who waits", ("who", "for", "seconds"), _waits_shown(waits)))
    for key, value in rest.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            columns = list(dict.fromkeys(column for row in value for column in row))
            cells = ([_text(row.get(column, "")) for column in columns] for row in value)
            tables.append(_table(_words(key), map(_words, columns), cells))
        elif value not in ("", None, []):
            run.add_row(_words(key), _text(value))
    return tables


def awaited_by(wait: Mapping[str, Any]) -> str:
    """Return words for what a waiting process waits for, such as ``a lease``. ``wait`` is an entry of the status."""
    return _AWAITED.get(wait["for"], str(wait["for"]))


def _run_rows(rest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each row of the table about the run.

    ``rest`` is a copy of the status. The keys that the table shows are removed from it.
    """
    if "step" in rest:
        step, num_steps = rest.pop("step"), rest.pop("num_steps", None)
        yield "step", "no learner yet" if step is None else f"{step} of {num_steps}" if num_steps else str(step)
    if announced := rest.pop("announced", None):
        # Without the public key that a channel may have.
        yield "weights", f"version {announced.get('version')} from {str(announced.get('channel')).partition(' ')[0]}"
        if ports := announced.get("ports"):
            yield "ports for weights", ", ".join(map(str, ports))
    for key, label in _LABELS.items():
        value = rest.pop(key, None)
        if value not in ("", None, []) and (value or key not in _ONLY_IF_ANY):
            yield label, _text(value)
    if (limit := (rest.pop("run_ahead", None) or {}).get("queue/run_ahead_limit")) is not None:
        yield "taken, in flight and ready", f"at most {limit:.0f} groups (queue.run_ahead)"
    for text in (rest.pop("group_notes", None) or {}).values():
        yield "note", text
    if "max_bytes" in rest:
        keys = ("bytes", "bytes_reserved", "bytes_pinned", "max_bytes")
        stored, reserved, kept, limit = (size_text(rest.pop(key, 0)) for key in keys)
        kept_too = "" if kept == size_text(0) else f", {kept} kept for checkpoints"
        yield "memory", f"{stored} of groups, {reserved} reserved by leases{kept_too}, limit {limit}"
    for text in rest.pop("training_notes", None) or ():
        yield "note", text
    for text in rest.pop("changes", None) or ():
        yield "changed", text
    if stream := rest.pop("stream", None):
        again = f", {stream['requeued']} earlier ones to lease again" if stream.get("requeued") else ""
        passed = stream.get("aside", 0) + stream.get("thinned", 0)
        over = f", {passed} passed over by data.curriculum" if passed else ""
        yield "next prompt", f"number {stream['position']} of the data, epoch {stream['epoch']}{over}{again}"
    if "leases" in rest:
        yield "leases", str(len(rest.pop("leases")))


def _generators_table(generators: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"generators: {len(generators)}", title_justify="left")
    # An id begins with the host unless the user chose it. On a narrow screen only the names are broken over lines.
    hosts = ["" if str(g.get("id", "")).startswith(str(g.get("host"))) else str(g.get("host", "")) for g in generators]
    table.add_column("id", overflow="fold")
    if any(hosts):
        table.add_column("host", overflow="fold")
    for column in ("version", "busy", "tokens", "tokens/s", "last seen"):
        table.add_column(column, no_wrap=True)
    troubles = generator_troubles(generators)
    by_need = sorted(
        zip(generators, hosts, strict=True), key=lambda g: g[0].get("alive", True) and g[0].get("id") not in troubles
    )
    for generator, generator_host in by_need[:_MAX_GENERATORS]:
        stats = generator.get("stats") or {}
        wall_s, max_running = stats.get("wall_s", 0.0), stats.get("max_running", 0)
        active, seen_s = generator.get("active"), generator.get("seen_s_ago")
        gone = "" if generator.get("alive", True) else "gone, "
        table.add_row(
            str(generator.get("id", "")),
            *([generator_host] if any(hosts) else []),
            str(active[1]) if active else "-",
            f"{stats['busy_sequence_s'] / (wall_s * max_running):.0%} of {max_running}"
            if wall_s and max_running
            else "-",
            f"{stats['num_tokens']:,}" if stats else "-",
            f"{stats['num_tokens'] / wall_s:,.0f}" if wall_s else "-",
            "-" if seen_s is None else f"{gone}{seen_s:.1f} s ago",
        )
    if (more := len(generators) - _MAX_GENERATORS) > 0:
        table.caption, table.caption_justify = f"and {more} others; --json shows each", "left"
    return table


def by_trouble(troubles: Mapping[str, str]) -> dict[str, str]:
    """Return one entry for each problem of ``generator_troubles``: the ids that have it, of many only some, and it."""
    ids: dict[str, list[str]] = {}
    for generator_id, trouble in troubles.items():
        ids.setdefault(trouble, []).append(generator_id)
    named: dict[str, str] = {}
    for trouble, same in ids.items():
        named[_some_of(same)] = trouble
    return named


def _some_of(ids: Sequence[str]) -> str:
    """Return the first ``_MAX_IDS`` of ``ids`` and the number of the others."""
    more = f" and {len(ids) - _MAX_IDS} others" if len(ids) > _MAX_IDS else ""
    return f"{', '.join(ids[:_MAX_IDS])}{more}"


def generator_troubles(generators: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return by id what is wrong with each of ``generators`` with which something is wrong."""
    troubles: dict[str, str] = {}
    for generator in generators:
        quarantined, trouble = generator.get("quarantined"), generator.get("trouble") or generator.get("too_slow")
        if generator.get("alive", True) and (quarantined or trouble):
            troubles[str(generator.get("id", ""))] = f"quarantined: {quarantined}" if quarantined else str(trouble)
    return troubles


def _ledger_tables(ledger: Mapping[str, Any]) -> list[Table]:
    """Return the tables that show ``ledger``, the part of the status with the queue's counts.

    The first has the counts of training groups, the second those of evaluation groups. The third shows how many
    received groups were trained, dropped and so on, with mean rewards. Its trained groups contain the rollouts that the
    ledger lists as masked, because they were left out of the loss. Tables without rows are left out.
    """
    accounts = {name: ledger[name] for name in ("groups", "rollouts", "tokens") if name in ledger}
    of_evaluations = ledger.get("eval", {})
    outcomes: list[Sequence[str]] = []
    for name, sums in ledger.get("outcomes", {}).items():
        if number := sums["rollouts"]:
            means = (f"{sums[key] / number:.3f}" for key in ("reward", "accuracy"))
            outcomes.append([_words(name), *(f"{sums[key]:,}" for key in ("groups", "rollouts", "tokens")), *means])
        if name == "trained":
            masked = [sums[key] - ledger.get(key, {}).get(name, sums[key]) for key in ("rollouts", "tokens")]
            if any(masked):
                outcomes.append(["  of it masked", "", *(f"{count:,}" for count in masked), "", ""])
    columns = ("", "groups", "rollouts", "tokens", "mean reward", "mean accuracy")
    tables = (
        _table("ledger", ("", *accounts), ledger_rows(accounts), are_counts=True),
        _table("ledger of evaluations", ("", *of_evaluations), ledger_rows(of_evaluations), are_counts=True),
        _table("what became of received groups", columns, outcomes, are_counts=True),
    )
    return [table for table in tables if table.row_count]


def ledger_rows(accounts: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of a table of the queue's counts: the name of a count, and its number in each of ``accounts``.

    ``accounts`` maps what is counted, such as ``tokens``, to its counts. Rows of zeros are left out.
    """
    flat = [_flat(account) for account in accounts.values()]
    for term in dict.fromkeys(term for account in flat for term in account):
        if any(account.get(term) for account in flat):
            yield [_words(term), *(f"{account[term]:,}" if term in account else "" for account in flat)]


def _flat(account: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of ``account``, which is one column of the table, as a flat mapping from name to number.

    Nested counts get names such as ``dropped: stale``. The count ``received`` of tokens is renamed to ``issued``, so
    that it shares a row with the issued groups.
    """
    counts: dict[str, int] = {}
    for term, count in account.items():
        if isinstance(count, Mapping):
            counts |= {f"{term}: {cause}": number for cause, number in count.items()}
        else:
            counts["issued" if term == "received" else term] = count
    return counts


def _waits_shown(waits: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield who waits, for what and how long, longest first.

    Of more than ``_MAX_GENERATORS`` waits, those for the same thing share a line with the shortest and longest time.
    """
    longest_first = sorted(waits, key=lambda wait: wait["since_s"], reverse=True)
    together: dict[Any, list[Mapping[str, Any]]] = {}
    for number, wait in enumerate(longest_first):
        together.setdefault(awaited_by(wait) if len(waits) > _MAX_GENERATORS else number, []).append(wait)
    for same in together.values():
        longest, shortest = (f"{wait['since_s']:.1f}" for wait in (same[0], same[-1]))
        yield (
            _some_of([str(wait["who"]) for wait in same]),
            awaited_by(same[0]),
            longest if len(same) == 1 else f"{shortest} to {longest}",
        )


def _table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], *, are_counts: bool = False
) -> Table:  # fmt: skip
    """Return a table of text. With ``are_counts`` all columns but the first have numbers, which end at one place."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if are_counts and index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _words(key: str) -> str:
    return str(key).replace("_", " ")


def _text(value: Any) -> str:
    """Return a value of the status as short text. Zero entries of a mapping are left out."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(key)} {_text(v)}" for key, v in value.items() if v) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
