"""A conformance suite for backends: run it against your own backend before you use it. No torch, no pytest.

``check_backend`` takes a ``Subject`` (how to build the backend, and its weights). It raises ``ConformanceError`` if the
backend breaks a promise of ``backend.Backend`` or lacks a capability that it declares. Tests run every shipped backend
through it. All checks use one backend, because an engine may take a minute to start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from async_rl.errors import AsyncRLError
from async_rl.generator.backend import Backend, Sampled, TellingBackend
from async_rl.generator.parity import ScoringBackend
from async_rl.queue.parity import ProbeSequence
from async_rl.records import NO_VERSION, PER_TOKEN, Lease, LeaseKind, Prompt, Sampling
from async_rl.routes import RoutingShape
from async_rl.sampling_mask import contains

_SEEDS = 20
"""The number of leases to try for a random event, such as an answer that is long enough."""


class ConformanceError(AsyncRLError):
    """A backend breaks a promise of ``backend.Backend``. The message names the check, and what it expected and got."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend to test, what it is tested with, and the test's limits.

    Attributes:
        make: builds the backend, without weights.
        weights: returns the weights of a version for ``activate``; versions 1 and 2 must differ.
        messages: a prompt that the backend can encode.
        is_deterministic: whether ``make`` builds the backend as for ``sampling.deterministic = true``.
        max_new_tokens: large enough that new weights can arrive in the middle of an answer.
        routing: the shape of the routes of the backend's model; None if it has no experts.
        tolerance: the largest difference in nats between a token's logprob when sampled and when scored.
        limit_s: the longest time that an answer may take.
        keeps_version: whether an answer is sampled to its end with the weights that it began with, as vLLM's requests
            with adapters are, instead of going on with new ones.
    """

    make: Callable[[], Backend]
    weights: Callable[[int], Mapping[str, Any]] = lambda version: {}
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "1+1"},)
    is_deterministic: bool = False
    max_new_tokens: int = 48
    routing: RoutingShape | None = None
    tolerance: float = 1e-3
    limit_s: float = 120.0
    keeps_version: bool = False


def check_backend(subject: Subject) -> list[str]:
    """Run every check that applies to the backend. Return the names of the checks that ran.

    Raises:
        ConformanceError: a check failed.
        Exception: the backend itself raised it.
    """
    ran: list[str] = []
    with closing(_Trial(subject)) as trial:
        for check in CHECKS:
            trial.name = check.__name__
            if check(trial) is not False:
                ran.append(trial.name)
            trial.expect(
                trial.backend.num_running == 0, "no sequence to run after the check", trial.backend.num_running
            )
    return ran


class _Trial:
    """Holds the backend under test and has the steps that several checks need."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.name = "make"
        self.backend = subject.make()
        self.capabilities = self.backend.capabilities
        self._num_leases = 0

    def close(self) -> None:
        self.backend.close()

    def expect(self, holds: bool, expected: str, got: object) -> None:
        if not holds:
            raise ConformanceError(f"{type(self.backend).__name__}, {self.name}: expected {expected}, got {got}")

    def lease(self, *, group_size: int = 2, seed: int = 1, kind: LeaseKind = "train", **sampling: Any) -> Lease:
        """Return a new lease for the subject's prompt.

        It has temperature 1 and long answers, unless ``sampling`` overrides that.
        """
        self._num_leases += 1
        prompt = Prompt(0, 0, 0, tuple(self.subject.messages), {"gt_answer": "2"})
        chosen = structs.replace(Sampling(1.0, 1.0, 0, self.subject.max_new_tokens, 512, ()), **sampling)
        lease_id = f"lease-{self._num_leases}"
        return Lease(lease_id, kind, prompt, group_size, chosen, "lineage", 0, 0, 1, seed)

    def submit(self, lease: Lease) -> np.ndarray:
        prompt_ids = self.backend.encode_prompt(lease.prompt.messages)
        self.backend.submit(lease, prompt_ids)
        return prompt_ids

    def drain(self) -> list[Sampled]:
        """Run decode steps until no sequence is left. Return all samples that finished."""
        deadline, found = time.monotonic() + self.subject.limit_s, []
        while self.backend.num_running:
            found += self.backend.step()
            if time.monotonic() > deadline:
                raise ConformanceError(
                    f"{type(self.backend).__name__}, {self.name}: expected all sequences to finish within "
                    f"{self.subject.limit_s:g} s of step() calls, got {self.backend.num_running} that still run; "
                    f"correct step() or num_running, or raise Subject.limit_s if the backend is only slow"
                )
        return found

    def sample(self, lease: Lease) -> list[Sampled]:
        """Sample the lease. Return its samples in order of their index, after the checks that hold for every sample."""
        prompt_ids = self.submit(lease)
        found = sorted(self.drain(), key=lambda sample: sample.index)
        indices = [(sample.lease_id, sample.index) for sample in found]
        wanted = [(lease.lease_id, index) for index in range(lease.group_size)]
        self.expect(indices == wanted, f"one sample for each index of the lease {wanted}", indices)
        for sample in found:
            self._check_sample(lease, prompt_ids, sample)
        return found

    def _check_sample(self, lease: Lease, prompt_ids: np.ndarray, sample: Sampled) -> None:
        limit, count = lease.sampling.max_new_tokens, len(sample.token_ids)
        self.expect(np.array_equal(sample.prompt_ids, prompt_ids), f"prompt_ids {prompt_ids}", sample.prompt_ids)
        self.expect(0 < count <= limit, f"1 to max_new_tokens = {limit} tokens", count)
        for name in sample.__struct_fields__:
            column, array = PER_TOKEN.get("behavior_logprobs" if name == "logprobs" else name), getattr(sample, name)
            if column is not None and array is not None:
                self.expect(array.dtype == column.dtype, f"{name} as {column.dtype}", array.dtype)
                self.expect(array.shape == (count,), f"{count} {name}, one for each token", array.shape)
        is_logprob = bool(np.isfinite(sample.logprobs).all() and (sample.logprobs <= 1e-4).all())
        self.expect(is_logprob, "finite logprobs of at most 0", sample.logprobs)
        reason = sample.finish_reason
        self.expect(reason in ("stop", "length"), 'finish_reason "stop" or "length"', reason)
        if sample.finish_reason == "length":
            self.expect(count == limit, f'"length" after max_new_tokens = {limit} tokens only', count)
        self.expect(
            (sample.sampling_mask is not None) == lease.wants_sampling_mask,
            f"sampling_mask: {lease.wants_sampling_mask}",
            sample.sampling_mask,
        )
        self.expect((sample.routes is not None) == lease.wants_routes, f"routes: {lease.wants_routes}", sample.routes)

    def activate(self) -> int:
        """Activate the weights of the next version. Return the version's number."""
        version = self.backend.version + 1 if self.backend.version != NO_VERSION else 1
        weights = self.subject.weights(version)
        pause_s = self.backend.activate(version, weights)
        self.expect(pause_s >= 0, "the seconds of the pause from activate", pause_s)
        self.expect(self.backend.version == version, f"version {version} after activate", self.backend.version)
        return version


def starts_without_weights(trial: _Trial) -> None:
    backend = trial.backend
    trial.expect(backend.version == NO_VERSION, f"version {NO_VERSION} before the first activate", backend.version)
    trial.expect(backend.max_running >= 1, "room for at least one sequence", backend.max_running)
    trial.expect(backend.step() == [], "nothing from a step without leases", "samples")
    trial.expect(backend.progress() == {}, "no progress without leases", backend.progress())
    try:
        trial.submit(trial.lease())
    except RuntimeError:
        pass
    else:
        trial.expect(False, "RuntimeError from submit before the first activate", "none")
    trial.activate()


def implements_what_it_declares(trial: _Trial) -> None:
    scores = isinstance(trial.backend, ScoringBackend)
    declared = trial.capabilities.scores_tokens
    trial.expect(scores == declared, f"name, dtype, score and digests: {declared}, as scores_tokens says", scores)
    deterministic = trial.capabilities.deterministic or not trial.subject.is_deterministic
    trial.expect(deterministic, "deterministic to be declared by a subject that is", "False")


def encodes_prompts(trial: _Trial) -> None:
    first, second = (trial.backend.encode_prompt(trial.subject.messages) for _ in range(2))
    trial.expect(first.dtype == np.int32 and first.ndim == 1 and len(first) > 0, "token ids, int32 [P > 0]", first)
    trial.expect(np.array_equal(first, second), "the same token ids for the same messages", second)


def returns_a_sample_for_each_index(trial: _Trial) -> None:
    before, lease = trial.backend.num_tokens, trial.lease(group_size=3)
    found = trial.sample(lease)
    versions = {int(version) for sample in found for version in sample.versions}
    trial.expect(versions == {trial.backend.version}, f"the active version {trial.backend.version} only", versions)
    trial.expect(trial.backend.progress() == {}, "no progress of a finished lease", trial.backend.progress())
    trial.expect(trial.backend.num_tokens > before, f"num_tokens above {before}", trial.backend.num_tokens)


def samples_differ_within_a_group(trial: _Trial) -> None:
    texts = [tuple(sample.token_ids) for sample in trial.sample(trial.lease(group_size=4, top_p=1.0))]
    trial.expect(len(set(texts)) > 1, "different answers within a group at temperature 1", texts[0])


def stops_at_max_new_tokens(trial: _Trial) -> None:
    counts = [len(sample.token_ids) for sample in trial.sample(trial.lease(max_new_tokens=1))]
    trial.expect(counts == [1, 1], "1 token under max_new_tokens = 1", counts)


def stops_at_stop_strings(trial: _Trial) -> bool | None:
    if not trial.capabilities.has_model:
        return False  # its text does not depend on its tokens
    texts = "".join(sample.text for sample in trial.sample(trial.lease(kind="eval")))
    trial.expect(texts != "", "text in at least one of the answers", "none")
    stops = tuple(sorted(set(texts)))
    for sample in trial.sample(trial.lease(kind="eval", stop=stops)):
        stopped = any(stop in sample.text for stop in stops)
        trial.expect(sample.finish_reason == "stop" or not stopped, '"stop" after a stop string', sample)
        trial.expect(len(sample.text) <= max(map(len, stops)), "an answer that ends at the stop string", sample.text)
    return None


def obeys_top_k_and_reports_what_it_left(trial: _Trial) -> bool | None:
    if not trial.capabilities.reports_sampling_mask:
        return False
    for sample in trial.sample(trial.lease(top_k=3)):
        assert sample.sampling_mask is not None  # checked for every sample
        trial.expect(
            len(sample.sampling_mask) == len(sample.token_ids),
            "a sampling mask for each token",
            len(sample.sampling_mask),
        )
        trial.expect(
            bool(contains(sample.sampling_mask, sample.token_ids).all()), "each token in its own set", sample.token_ids
        )
        sizes = sample.sampling_mask.sizes  # of ids where above 0, of words of bits where below
        trial.expect(bool(((sizes <= 3) & (sizes != 0)).all()), "at most 3 sampling masks under top_k = 3", sizes)
    trial.sample(trial.lease(kind="eval", top_k=3))
    return None


def reports_the_routes_of_every_token(trial: _Trial) -> bool | None:
    shape = trial.subject.routing
    if not trial.capabilities.reports_routes or shape is None:
        return False
    for sample in trial.sample(structs.replace(trial.lease(), wants_routes=True)):
        assert sample.routes is not None  # checked for every sample
        expected = (len(sample.prompt_ids) + len(sample.token_ids) - 1, shape.num_layers, shape.top_k)
        trial.expect(sample.routes.shape == expected, f"routes of the shape {expected}", sample.routes.shape)
        trial.expect(sample.routes.dtype == shape.dtype, f"routes as {shape.dtype}", sample.routes.dtype)
        ranked = np.sort(sample.routes, axis=-1)
        differ = bool((ranked[..., 1:] != ranked[..., :-1]).all()) and int(ranked.max()) < shape.num_experts
        trial.expect(differ, f"different experts below {shape.num_experts} for each token and layer", sample.routes)
    trial.sample(trial.lease())
    return None


def tells_what_it_has_sampled(trial: _Trial) -> bool | None:
    backend, lease, told = trial.backend, trial.lease(group_size=1), list[int]()
    if not isinstance(backend, TellingBackend):
        return False
    trial.submit(lease)
    while not (done := backend.step()):
        told += [int(one) for ids in backend.tokens_after({lease.lease_id: len(told)}).values() for one in ids]
    return trial.expect(told == done[0].token_ids[: len(told)].tolist(), f"to tell {done[0].token_ids}", told)


def runs_more_than_fit_at_once(trial: _Trial) -> None:
    size = trial.backend.max_running + 2
    first, second = trial.lease(group_size=size), trial.lease(group_size=2)
    for lease in (first, second):
        trial.submit(lease)
    total = size + 2
    trial.expect(
        trial.backend.num_running == total, f"num_running {total}, those in line too", trial.backend.num_running
    )
    open_leases = set(trial.backend.progress())
    trial.expect(open_leases <= {first.lease_id, second.lease_id}, "progress of submitted leases only", open_leases)
    found = {(sample.lease_id, sample.index) for sample in trial.drain()}
    trial.expect(len(found) == total, f"{total} samples", len(found))


def forgets_what_is_cancelled(trial: _Trial) -> None:
    cancelled, kept = trial.lease(group_size=trial.backend.max_running + 1, seed=2), trial.lease(seed=3)
    for lease in (cancelled, kept):
        trial.submit(lease)
    done = [sample for sample in trial.backend.step() if sample.lease_id == kept.lease_id]
    trial.backend.cancel(cancelled.lease_id)
    trial.backend.cancel("a lease that nobody submitted")
    trial.expect(cancelled.lease_id not in trial.backend.progress(), "no progress of a cancelled lease", "some")
    done += trial.drain()
    found = sorted((sample.lease_id, sample.index) for sample in done)
    wanted = [(kept.lease_id, 0), (kept.lease_id, 1)]
    trial.expect(found == wanted, f"samples of the other lease only, {wanted}", found)
    trial.sample(trial.lease())


def stamps_versions_across_a_weight_update(trial: _Trial) -> None:
    """Running sequences go on with the new weights, or all with the old ones (``Subject.keeps_version``), and every
    token carries the version that sampled it.
    """
    backend, keeps = trial.backend, trial.subject.keeps_version
    for seed in range(_SEEDS):
        old, lease = backend.version, trial.lease(seed=seed)
        trial.submit(lease)
        done: list[Sampled] = []
        while backend.num_running and not backend.progress().get(lease.lease_id):
            done += backend.step()
        num_before = len(done)
        trial.activate()
        done += trial.drain()
        for sample in done:
            rises = bool((np.diff(sample.versions) >= 0).all())
            known = set(sample.versions.tolist()) <= ({old} if keeps else {old, old + 1})
            trial.expect(rises and known, f"version {old}" + ("" if keeps else f", then {old + 1}"), sample.versions)
        if len(done) > num_before if keeps else any(len(set(sample.versions.tolist())) == 2 for sample in done):
            return
    what = "that new weights met" if keeps else "with tokens of two versions"
    trial.expect(False, f"an answer {what} in {_SEEDS} leases; is max_new_tokens too small", "none")


def repeats_itself_if_deterministic(trial: _Trial) -> bool | None:
    if not trial.subject.is_deterministic:
        return False
    first = trial.sample(trial.lease(seed=5))
    other = trial.lease(seed=6)
    lease = trial.lease(seed=5)
    for one in (other, lease):
        trial.submit(one)
    again = sorted((s for s in trial.drain() if s.lease_id == lease.lease_id), key=lambda sample: sample.index)
    for before, after in zip(first, again, strict=True):
        same = np.array_equal(before.token_ids, after.token_ids) and np.array_equal(before.logprobs, after.logprobs)
        trial.expect(same, f"the same bits for the same seed, {before.token_ids}", after.token_ids)
    return None


def scores_what_it_sampled(trial: _Trial) -> bool | None:
    backend = trial.backend
    if not isinstance(backend, ScoringBackend):
        return False
    trial.expect(bool(backend.name and backend.dtype), "a name and a dtype", (backend.name, backend.dtype))
    for temperature in (1.0, 0.5):
        found = trial.sample(trial.lease(temperature=temperature))
        probes = [
            ProbeSequence(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int32), len(one.token_ids))
            for one in found
        ]
        wanted = np.concatenate([one.logprobs for one in found])
        scores = backend.score_tokens(probes, temperature)
        assert scores is not None  # a backend may refuse other modes, not this one
        trial.expect(scores.dtype == np.float32 and scores.shape == wanted.shape, f"float32 {wanted.shape}", scores)
        off = float(np.abs(scores - wanted).max())
        limit = trial.subject.tolerance
        trial.expect(off <= limit, f"scores within {limit} nats of the behavior logprobs at {temperature}", off)
    return None


def digests_tell_weights_apart(trial: _Trial) -> bool | None:
    backend = trial.backend
    if not isinstance(backend, ScoringBackend):
        return False
    before = dict(backend.digests())
    trial.expect(bool(before) and before == dict(backend.digests()), "digests that repeat", before)
    trial.activate()
    trial.expect(before != dict(backend.digests()), "other digests of other weights", "the same")
    return None


CHECKS: tuple[Callable[[_Trial], bool | None], ...] = (
    starts_without_weights,
    implements_what_it_declares,
    encodes_prompts,
    returns_a_sample_for_each_index,
    samples_differ_within_a_group,
    stops_at_max_new_tokens,
    stops_at_stop_strings,
    obeys_top_k_and_reports_what_it_left,
    reports_the_routes_of_every_token,
    tells_what_it_has_sampled,
    runs_more_than_fit_at_once,
    forgets_what_is_cancelled,
    stamps_versions_across_a_weight_update,
    repeats_itself_if_deterministic,
    scores_what_it_sampled,
    digests_tell_weights_apart,
)
"""In order; the first one activates the first version. A check that does not apply returns False."""
