"""Faults in ranks and collectives."""

from __future__ import annotations

import torch
from registry import Sound, caught_by


@caught_by("ranks")
class ShardsThatOverlap(Sound):
    def data_shard(self, runtime):
        return 0, runtime.num_processes


@caught_by("ranks")
class EveryRankReadsEverything(Sound):
    def data_shard(self, runtime):
        return 0, 1


@caught_by("loader")
class LastBatchIsLost(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        held = None
        for batch in batches:
            if held is not None:
                yield held
            held = batch


@caught_by("loader")
class AnErrorEndsTheEpoch(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        fed = iter(super().feed_device(accelerator, batches, non_blocking))
        while True:
            try:
                yield next(fed)
            except Exception:
                return


@caught_by("loader")
class ReadsTheEpochFirst(Sound):
    def feed_device(self, accelerator, batches, non_blocking):
        yield from list(super().feed_device(accelerator, batches, non_blocking))


@caught_by("collectives")
class GatherInAnotherOrder(Sound):
    def gather(self, accelerator, tensor, scope):
        parts = super().gather(accelerator, tensor, scope).chunk(accelerator.num_processes)
        return torch.cat(parts[::-1])


@caught_by("collectives")
class GathersFloats(Sound):
    def gather(self, accelerator, tensor, scope):
        return super().gather(accelerator, tensor.float(), scope).to(tensor.dtype)


@caught_by("collectives")
class EverythingTravelsAsFloat(Sound):
    def reduce(self, accelerator, tensor, op, scope):
        return super().reduce(accelerator, tensor.float(), op, scope).to(tensor.dtype)


@caught_by("collectives")
class MeanIsSum(Sound):
    def reduce(self, accelerator, tensor, op, scope):
        return super().reduce(accelerator, tensor, "sum" if op == "mean" else op, scope)


@caught_by("collectives")
class BroadcastFromTheFirst(Sound):
    def broadcast(self, accelerator, tensor, src, scope):
        return super().broadcast(accelerator, tensor, 0, scope)


@caught_by("objects")
class ObjectsOnTheMainRankOnly(Sound):
    def gather_object(self, accelerator, obj, scope):
        found = super().gather_object(accelerator, obj, scope)
        return found if accelerator.process_index == 0 or not isinstance(obj, dict) else [obj]


@caught_by("pieces")
class EveryRankGetsTheFirstPiece(Sound):
    def scatter(self, accelerator, parts, like, src, scope):
        parts = None if parts is None else [parts[0]] * len(parts)
        return super().scatter(accelerator, parts, like, src, scope)


@caught_by("pieces")
class ScattersFromTheFirst(Sound):
    def scatter(self, accelerator, parts, like, src, scope):
        return super().scatter(accelerator, parts, like, 0, scope)


@caught_by("objects")
class ScattersObjectsFromTheFirst(Sound):
    def scatter_object(self, accelerator, objs, src, scope):
        return super().scatter_object(accelerator, objs, 0, scope)


@caught_by("pieces")
class ElementsInsteadOfPieces(Sound):
    def all_to_all(self, accelerator, tensor, scope):
        count, rank = accelerator.num_processes, accelerator.process_index
        every = super().gather(accelerator, tensor, scope).view(count, -1)
        return every[:, rank::count].reshape(-1)


@caught_by("collectives")
class TheMostOfIntegersIsTheirSum(Sound):
    def reduce(self, accelerator, tensor, op, scope):
        op = "sum" if op == "max" and not tensor.is_floating_point() else op
        return super().reduce(accelerator, tensor, op, scope)


@caught_by("barrier")
class NobodyWaits(Sound):
    def barrier(self, accelerator, scope):
        return None
