"""The groups of ranks that work together, as torch's device meshes. ``config.parallel`` has their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.config.parallel import Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that this rank belongs to. All ranks must build it at the same time.

    Attributes:
        fsdp: ranks over which parameters are sharded, those that share a sequence among them. With replicas it has two
            dimensions, replicas and shards, as ``fully_shard`` takes them.
        tensor: ranks that share every layer; None if that is one.
        experts: ranks over which the experts of a layer are divided; None if they are not.
        expert_fsdp: ranks with the same experts, over which these are sharded, like ``fsdp``.
        sequence: ranks that share the tokens of a micro-batch; None if that is one.
        pipeline: one rank of each stage; None if there is one stage.
    """

    fsdp: DeviceMesh
    tensor: DeviceMesh | None
    experts: DeviceMesh | None
    expert_fsdp: DeviceMesh
    sequence: DeviceMesh | None
    pipeline: DeviceMesh | None

    @classmethod
    def build(cls, layout: Layout, device_type: str, timeout: timedelta) -> Mesh:
        """Connect the ranks of each group. Their collectives fail after ``timeout``."""
        sizes = (layout.pipeline, layout.replicas, layout.shards * layout.sequence, layout.tensor)
        whole = init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "replicas", "shards", "tensor"))
        _set_timeout(whole, timeout)
        fsdp = whole["replicas", "shards"] if layout.replicas > 1 else whole["shards"]
        experts, expert_fsdp = None, fsdp
        if layout.experts > 1:
            # Another division of the same ranks.
            outer = layout.shards * layout.sequence // layout.experts
            parts = init_device_mesh(
                device_type,
                (layout.pipeline, layout.replicas, outer, layout.experts),
                mesh_dim_names=("pipeline", "replicas", "shards", "experts"),
            )
            _set_timeout(parts, timeout)
            experts = parts["experts"]
            expert_fsdp = parts["replicas", "shards"] if layout.replicas > 1 else parts["shards"]
        sequence = None
        if layout.sequence > 1:
            # A mesh of its own: parameters are sharded over these ranks and the shards alike.
            outer = layout.num_ranks // (layout.sequence * layout.tensor)
            parts = init_device_mesh(
                device_type, (outer, layout.sequence, layout.tensor), mesh_dim_names=("outer", "sequence", "inner")
            )
            _set_timeout(parts, timeout)
            sequence = parts["sequence"]
        return cls(
            fsdp=fsdp,
            tensor=whole["tensor"] if layout.tensor > 1 else None,
            experts=experts,
            expert_fsdp=expert_fsdp,
            sequence=sequence,
            pipeline=whole["pipeline"] if layout.pipeline > 1 else None,
        )


def _set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set it for every group of the mesh, which torch gives its own default: 10 minutes for NCCL, 30 for gloo."""
    for group in mesh.get_all_groups():
        # Public from torch 2.14 on.
        getattr(distributed_c10d, "set_timeout", distributed_c10d._set_pg_timeout)(timeout, group)
