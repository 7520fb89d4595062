"""Groups as the learner holds them: checked arrays per sample, and the book of what was asked for and has arrived.

`parse_group` turns a Group message (metas + concatenated array frames) into a `GroupData`; whatever is inconsistent in
it is a ProtocolError that names what was found. `Inbox` leases groups as they become ready until a batch is full,
never as a whole batch. Pure: no sockets, no clocks. Called by the learner's daemon, its tests and the in-process loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from temper.common.arrays import divide, unpack_arrays, unpacked
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec, Group, Lane, SampleMeta, Samples, unpack_frames
from temper.kernels.flags import SUPPORT_LIMIT
from temper.learner.routing_replay import NAME, Routing

Array = NDArray[Any]

REQUIRED = {"tokens": "int32", "behaviour_logprob": "float32", "loss_mask": "uint8", "cu_seqlens": "int64"}
OPTIONAL = {"support_ids": "int32", "support_cu": "int64"}


@dataclass(frozen=True, slots=True, eq=False)
class SampleData:
    """One sample. Arrays have N = prompt + completion tokens.

    `tokens` i32[N]; `mask` bool[N], true where the engine sampled the token; `behaviour_logprob` f32[N] (nats, 0 where
    the mask is false); `ordinal` i64[N], the version that sampled each token; `support_ids` i32[M] with `support_cu`
    i64[N+1] where the engine cut the distribution (top-p, top-k, min-p); `experts` i16[N, layers, experts per token] that
    the engine used, -1 where unknown. `reward` None: outside baseline and loss.
    """

    index: int
    tokens: Array
    mask: Array
    behaviour_logprob: Array
    ordinal: Array
    reward: float | None
    correct: bool | None = None
    components: dict[str, float] = field(default_factory=dict)
    outcome: str = "ok"
    finish_reason: str = "stop"
    step_rewards: tuple[tuple[int, float], ...] = ()
    task_key: str = ""
    support_ids: Array | None = None
    support_cu: Array | None = None
    experts: Array | None = None

    @property
    def generated(self) -> int:
        """Tokens that the engine sampled."""
        return int(self.mask.sum())

    def lag(self, version: int) -> Array:
        """i64[N]: version at the start of the step - version that sampled the token, across lineages, never below 0."""
        return np.maximum(version - self.ordinal, 0)


@dataclass(frozen=True, slots=True, eq=False)
class GroupData:
    """The samples of one task (lane ``demo``: demonstrations of one domain), in order of their index."""

    group_id: int
    lane: Lane
    domain: str
    level: int
    task_seed: int
    samples: tuple[SampleData, ...]
    pinned_version: int | None = None
    void: str | None = None

    @property
    def mixed(self) -> bool:
        """Whether raw correctness differs between its samples: 0 < mean accuracy < 1."""
        verdicts = [s.correct for s in self.samples if s.correct is not None]
        return 0 < sum(verdicts) < len(verdicts)

    @property
    def scored(self) -> int:
        """Samples with a reward."""
        return sum(s.reward is not None for s in self.samples)


def _part_arrays(specs: Sequence[ArraySpec], frames: Sequence[Any], routing: Routing | None) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    records: Array | None = None
    for spec, frame in zip(specs, unpacked(specs, frames), strict=True):
        if spec.name == NAME and routing is not None:
            [records] = unpack_arrays([spec], [frame]).values()
        want = REQUIRED.get(spec.name) or OPTIONAL.get(spec.name)
        if want is None:
            continue
        if spec.dtype != want:
            raise ProtocolError(f"array {spec.name} has dtype {spec.dtype}, expected {want}")
        try:
            arrays[spec.name] = np.frombuffer(frame, dtype=want).reshape(spec.shape)
        except ValueError as error:
            raise ProtocolError(f"array {spec.name}: {error}") from error
        if arrays[spec.name].ndim != 1:
            raise ProtocolError(f"array {spec.name} has shape {spec.shape}, expected one dimension")
    missing = sorted(REQUIRED.keys() - arrays.keys())
    if missing:
        raise ProtocolError(f"samples without {', '.join(missing)}")
    total = len(arrays["tokens"])
    for name in ("behaviour_logprob", "loss_mask"):
        if len(arrays[name]) != total:
            raise ProtocolError(f"{len(arrays[name])} values of {name} for {total} tokens")
    if records is not None and routing is not None:
        arrays[NAME] = routing.checked(records, total)
    return arrays


def _check_ids(arrays: dict[str, Array], vocabulary: int) -> None:
    """ProtocolError unless every id is in the vocabulary and each sampled token is in its own support, ids there once."""
    tokens = arrays["tokens"]
    for name in ("tokens", "support_ids"):
        ids = arrays.get(name)
        if ids is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ProtocolError(f"{name} holds ids {int(ids.min())}..{int(ids.max())}, expected 0..{vocabulary - 1}")
    if "support_cu" not in arrays:
        return
    ids, sizes = arrays["support_ids"], np.diff(arrays["support_cu"])
    if len(sizes) and int(sizes.max()) > SUPPORT_LIMIT:
        raise ProtocolError(f"a token has a support of {int(sizes.max())} ids, expected at most {SUPPORT_LIMIT}")
    rows = np.repeat(np.arange(len(sizes)), sizes)
    found = sizes == 0
    found[rows[ids == tokens[rows]]] = True
    lost = np.flatnonzero(~found & (arrays["loss_mask"] != 0))
    if len(lost):
        raise ProtocolError(f"token {int(tokens[lost[0]])} at {int(lost[0])} is not in the support it was sampled from")
    keys = np.sort(rows * np.int64(vocabulary) + ids)
    if (keys[1:] == keys[:-1]).any():
        raise ProtocolError("a token's support holds an id twice")


def ordinals(meta: SampleMeta, tokens: int) -> Array:
    """i64[tokens]: the version that sampled each token, from [lineage, ordinal, count] runs over all tokens."""
    counts = [run[2] for run in meta.version_runs]
    if sum(counts) != tokens or any(count < 0 for count in counts):
        raise ProtocolError(f"version runs cover {sum(counts)} tokens of sample {meta.index}, which has {tokens}")
    return np.repeat(np.asarray([run[1] for run in meta.version_runs], dtype=np.int64), counts)


def _sample(meta: SampleMeta, arrays: dict[str, Array], start: int, stop: int) -> SampleData:
    if stop - start < 2:
        raise ProtocolError(f"sample {meta.index} has {stop - start} tokens, expected a prompt and a completion")
    mask = arrays["loss_mask"][start:stop] != 0
    logprob = arrays["behaviour_logprob"][start:stop]
    if mask[0]:
        raise ProtocolError(f"sample {meta.index} has no prompt: its first token is marked as sampled")
    if not np.isfinite(logprob[mask]).all():
        raise ProtocolError(f"sample {meta.index} has a behaviour log-probability that is not finite")
    reward = meta.reward if meta.reward is not None and np.isfinite(meta.reward) else None
    support_ids = support_cu = None
    if "support_cu" in arrays:
        cu = arrays["support_cu"]
        support_cu = cu[start : stop + 1] - cu[start]
        support_ids = arrays["support_ids"][cu[start] : cu[stop]]
    return SampleData(
        index=meta.index,
        tokens=arrays["tokens"][start:stop],
        mask=mask,
        behaviour_logprob=logprob,
        ordinal=ordinals(meta, stop - start),
        reward=reward,
        correct=meta.correct,
        components=dict(meta.components),
        outcome=meta.outcome,
        finish_reason=meta.finish_reason,
        step_rewards=tuple((int(token), float(value)) for token, value in meta.step_rewards),
        task_key=meta.task_key,
        support_ids=support_ids,
        support_cu=support_cu,
        experts=arrays[NAME][start:stop] if NAME in arrays else None,
    )


def parse_group(
    body: Group, frames: Sequence[Any], vocabulary: int | None = None, routing: Routing | None = None
) -> GroupData:
    """The group in a message. ProtocolError when arrays, metas and frames do not fit together, or (`vocabulary`: size)
    hold ids that the model does not have. `routing`: the model's, if samples of the train lane are to say where their tokens
    went."""
    parts, frames = body.parts, list(frames)
    if body.facts:
        parts, frames = unpack_frames(frames[: body.facts], list[Samples]), frames[body.facts :]
    samples: dict[int, SampleData] = {}
    for part, own in zip(parts, divide([part.arrays for part in parts], frames), strict=True):
        arrays = _part_arrays(part.arrays, own, routing)
        if routing is not None and body.lane == "train" and NAME not in arrays:
            raise ProtocolError(
                f"samples without {NAME}, which engine.routed_experts asks for: does the actor read this recipe?"
            )
        cu = arrays["cu_seqlens"]
        if len(cu) != len(part.samples) + 1 or cu[0] != 0 or cu[-1] != len(arrays["tokens"]) or (np.diff(cu) < 0).any():
            raise ProtocolError(
                f"cu_seqlens {cu[:4].tolist()}... does not divide {len(arrays['tokens'])} tokens "
                f"among {len(part.samples)} samples"
            )
        support = arrays.get("support_cu")
        if support is not None and (
            len(support) != len(arrays["tokens"]) + 1
            or "support_ids" not in arrays
            or support[0] != 0
            or support[-1] != len(arrays["support_ids"])
            or (np.diff(support) < 0).any()
        ):
            raise ProtocolError(f"support_cu of group {body.group_id} does not divide its support_ids among the tokens")
        if vocabulary is not None:
            _check_ids(arrays, vocabulary)
        for i, meta in enumerate(part.samples):
            if meta.index in samples:
                raise ProtocolError(f"group {body.group_id} has sample {meta.index} twice")
            samples[meta.index] = _sample(meta, arrays, int(cu[i]), int(cu[i + 1]))
    return GroupData(
        group_id=body.group_id,
        lane=body.lane,
        domain=body.domain,
        level=body.level,
        task_seed=body.task_seed,
        samples=tuple(samples[index] for index in sorted(samples)),
        pinned_version=body.pinned_version,
        void=body.void,
    )


def void_reason(group: GroupData, samples_per_group: int, dynamic_sampling: bool) -> str | None:
    """Why a train group cannot be learned from, or None: "infra" with fewer than two scored samples (one where groups
    are of one), "no contrast" when `dynamic_sampling` and its raw verdicts are all right or all wrong."""
    if group.scored < min(2, samples_per_group):
        return "infra"
    if dynamic_sampling and not group.mixed:
        return "no contrast"
    return None


class Inbox:
    """Groups that have arrived per lane, and how many are still asked for.

    Guarantees: a group id is taken once (a group sent twice after a broker restart is ignored while it is held);
    `ask(lane, want)` returns only what is missing to `want`, so demand never doubles.
    """

    def __init__(self) -> None:
        self._ready: dict[str, dict[int, GroupData]] = {}
        self._asked: dict[str, int] = {}

    def ask(self, lane: Lane, want: int) -> int:
        """How many more groups to demand so that held + outstanding reaches `want`; they count as asked for."""
        missing = max(0, want - self.held(lane) - self._asked.get(lane, 0))
        self._asked[lane] = self._asked.get(lane, 0) + missing
        return missing

    def put(self, group: GroupData) -> bool:
        """Hold a group; False if it is held already."""
        held = self._ready.setdefault(group.lane, {})
        if group.group_id in held:
            return False
        held[group.group_id] = group
        self._asked[group.lane] = max(0, self._asked.get(group.lane, 0) - 1)
        return True

    def held(self, lane: Lane) -> int:
        """Groups of `lane` that wait to be trained."""
        return len(self._ready.get(lane, {}))

    def ids(self, lane: Lane) -> list[int]:
        """Ids of the groups of `lane` that wait to be trained."""
        return list(self._ready.get(lane, {}))

    def outstanding(self, lane: Lane) -> int:
        """Groups of `lane` asked for that have not arrived."""
        return self._asked.get(lane, 0)

    def take(self, lane: Lane, count: int, ordered: bool) -> list[GroupData]:
        """Remove `count` groups, in order of arrival, or (`ordered`) those with the lowest ids; sorted by id."""
        held = self._ready.setdefault(lane, {})
        ids = sorted(held) if ordered else list(held)
        return [held.pop(group_id) for group_id in sorted(ids[:count])]

    def clear(self, lane: Lane) -> list[int]:
        """Forget a lane: what is held (ids returned) and what is outstanding."""
        self._asked[lane] = 0
        return sorted(self._ready.pop(lane, {}))
