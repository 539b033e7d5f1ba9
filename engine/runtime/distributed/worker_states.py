"""A worker opens the host states of its node here.

- On the host of rank 0, that process has made the planes, and fills them.
- On every other node the first rank makes them, in memory that the other ranks of the node share.
  Units that live on devices have a part on that of each rank. All of them get what the planes hold
  from rank 0.
- Where planes are divided among nodes, rank 0 has had the part of each node made,
  and fills it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.build.build import build_model
from engine.model.build.units import StreamedModel
from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.codec import config_of
from engine.runtime.distributed.messages import PlanesSpec
from engine.runtime.distributed.plane_copies import receive_planes
from engine.runtime.host.cross_node_planes import Nodes
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.host_states import HostStates, OpenedPlanes, Sharing
from engine.runtime.host.plane_version import PlaneVersion
from engine.runtime.host.ram_planes import PlaneMemory
from engine.runtime.host.sharded_planes import DeviceShards, OwnShards
from engine.runtime.host.shared_memory import OpenedMemory, OwnedMemory, SharedPlanes


@dataclass(frozen=True)
class Opener:
    """What host states need beside their planes. on_device: rank 0 allocates planes there, where it
    reaches this rank.
    """

    place: RankInfo
    backend: Backend
    on_device: DevicePlanes
    threads: int
    version: PlaneVersion


class WorkerStates:
    """The host states of one rank, with the model whose planes it has. memory: the planes are
    there, or are made there.
    """

    def __init__(self, opener: Opener, held: PlanesSpec, memory: PlaneMemory):
        self.held = held
        self._opener = opener
        self.model: StreamedModel = build_model(
            config_of(held.config), held.model, held.parts or held.adapters
        )
        backend = opener.backend
        is_on_gpu = backend.device.type != "cpu"
        self.host_states = HostStates(
            self.model.layouts,
            self.model.dtype,
            backend.register if is_on_gpu else None,
            backend.unregister if is_on_gpu else None,
            opener.threads,
            sharing=Sharing(memory, self._nodes, version=opener.version),
            opened=OpenedPlanes(
                held.optimizer, held.has_gradients, held.gpu_resident, self._planes_on_device()
            ),
        )

    @classmethod
    def made(cls, opener: Opener, held: PlanesSpec) -> tuple[WorkerStates, SharedPlanes]:
        """Makes the planes of this node. Returns the host states, and where other ranks find them.
        Raises FitError where RAM is too short.
        """
        memory = OwnedMemory()
        return cls(opener, held, memory), memory.planes

    @classmethod
    def opened(cls, opener: Opener, held: PlanesSpec, planes: SharedPlanes) -> WorkerStates:
        """Opens planes that another rank of this node has made."""
        return cls(opener, held, OpenedMemory(planes))

    @property
    def _is_reached(self) -> bool:
        """Whether rank 0 reaches the planes of this rank."""
        return self._opener.place.node_rank == 0 or self.held.nodes_per_replica > 1

    @property
    def _nodes(self) -> Nodes | None:
        """Nodes among which the planes are divided; None where they are whole."""
        place, nodes = self._opener.place, self.held.nodes_per_replica
        return Nodes(nodes, place.world_size, place.node_rank) if nodes > 1 else None

    def _planes_on_device(self) -> DevicePlanes:
        opener, held = self._opener, self.held
        if self._is_reached:
            return opener.on_device
        layouts = {layout.unit: layout for layout in self.model.layouts}
        place = opener.place
        shards = DeviceShards(
            layouts, self.model.dtype, lambda: held.optimizer, place.local_world_size
        )
        return OwnShards(opener.backend, shards, place.local_rank)

    def fill(self, collectives: Collectives, device: torch.device) -> None:
        """Takes part in filling the planes of the nodes other than rank 0's. Raises
        ExchangeError.
        """
        place, gpu_resident = self._opener.place, set(self.held.gpu_resident)

        def keeps(unit: str) -> bool:
            return place.node_rank > 0 and (place.is_first_on_node or unit in gpu_resident)

        receive_planes(self.host_states, collectives, device, keeps)

    def close(self) -> None:
        """Lets go of the planes. Rank 0 frees those on a device that it reaches."""
        self.host_states.close()
