"""Numbers and names of docs/reliability.md and SECURITY.md that no key sets: each is the one of the product."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.extensions.code_rewards import verifier
from async_rl.extensions.ops.mirror.copier import FILES_EVERY_S
from async_rl.extensions.ops.mirror.fetch import BEAT_S, SILENT_S
from async_rl.launch.supervisor import HEALTHY_S, MAX_RESTARTS
from async_rl.net import connections, streams
from async_rl.net.keys import REMOVED_AFTER_S, SECRET_VARIABLE
from async_rl.process.descriptors import FEW
from async_rl.process.stop import SAME_REQUEST_S
from async_rl.queue.core import groups
from async_rl.queue.core.failures import LONGEST_PAUSE_S, MAX_FAILED_IN_A_ROW
from async_rl.queue.core.generators import QUARANTINE_OF
from async_rl.queue.core.retries import TRANSIENT_WAIT_S
from async_rl.queue.server.sockets import BLOCKED_S
from async_rl.weights.tcp import request_server

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}})
WORDS = {1: "a", 3: "three", 5: "five", 10: "ten", 60: "an hour"}
OF_ADDRESS, UNAUTHENTICATED = connections.MAX_UNAUTHENTICATED_OF_ADDRESS, connections.MAX_UNAUTHENTICATED


def minutes(seconds: float) -> str:
    return WORDS[round(seconds / 60)]


RELIABILITY = (
    f"within `checkpoint.grace_s` ({CONFIG.checkpoint.grace_s:g} s)",
    f"`checkpoint.keep_last = 1` (default {CONFIG.checkpoint.keep_last})",
    f"`checkpoint.mirror_wait_s` ({CONFIG.checkpoint.mirror_wait_s / 60:g} minutes)",
    f"`loss.dual_clip` ({CONFIG.loss.dual_clip:g})",
    f"After `queue.max_outage_s` ({minutes(CONFIG.queue.max_outage_s)})",
    f"ignores its connection for {minutes(BLOCKED_S)} minute",
    f"a limit below {FEW} is named",
    f"more than {connections._CLIENT_HANDSHAKE_BYTES >> 10} KiB",
    f"{OF_ADDRESS} of an address, {UNAUTHENTICATED:,} in all, {connections.FIRST_MESSAGE_S:g} s",
    f"stream server {streams.MAX_UNAUTHENTICATED_OF_ADDRESS}, {streams.MAX_UNAUTHENTICATED}, "
    f"{request_server._HEADER_S:g} s",
    f"verifier {verifier.MAX_CONNECTIONS // 4}, {verifier.MAX_CONNECTIONS // 2}, {verifier._REQUEST_S:g} s",
    f"a port takes {connections.MAX_CONNECTIONS:,}, fewer if that would not leave "
    f"{connections._RESERVED_DESCRIPTORS} descriptors",
    f"a log-probability above {groups._MAX_LOGPROB:g}",
    f"of its last {QUARANTINE_OF} groups",
    f"its last {MAX_FAILED_IN_A_ROW} leases failed",
    f"up to {LONGEST_PAUSE_S:g} s, until a group is good",
    f"a transient one every {TRANSIENT_WAIT_S / 60:g} minutes",
    f"Signals within {SAME_REQUEST_S:g} s count as one",
    f"up to {WORDS[MAX_RESTARTS]} times unless it lived {minutes(HEALTHY_S)} minutes",
    f"other files every {minutes(FILES_EVERY_S)} minutes",
    f"makes a manifest each minute; another directory watches for {WORDS[round(SILENT_S / BEAT_S)]}",
)
SECURITY = (
    f"when the list has lacked it for {REMOVED_AFTER_S:g} s",
    f"random, or `{SECRET_VARIABLE}` of its environment",
)


@pytest.mark.parametrize(
    ("page", "words"),
    [*(("docs/reliability.md", words) for words in RELIABILITY), *(("SECURITY.md", words) for words in SECURITY)],
)
def test_a_number_of_the_page_is_that_of_the_product(page: str, words: str):
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())
