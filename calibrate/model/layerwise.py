"""A forward pass one decoder layer at a time, in which the caller decides how each layer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from calibrate.model.models import LoadedModel
from calibrate.model.streams import DecoderLayer, Stream, decoder_layers, layer_on_device

Through = Callable[[DecoderLayer, Stream], Stream]  # a prompt after a layer that runs in another way than the model's


class LayerwiseForward:
    """Prompts on their way through a model.

    Streams that are one object are moved once where a layer runs as the model has it.

    Args:
        loaded: the model.
        streams: the prompts before the first layer, as `begin` gives them; one may be there several times.

    Attributes:
        streams: the prompts before the next layer.
        layers: all decoder layers.
        number: which of them is next.
    """

    def __init__(self, loaded: LoadedModel, streams: Sequence[Stream]) -> None:
        self._loaded, self.streams = loaded, list(streams)
        self.layers, self.number = decoder_layers(loaded.model), 0

    @property
    def next_layer(self) -> DecoderLayer:
        """The layer that comes next."""
        return self.layers[self.number]

    @torch.no_grad()
    def moving(self, through: Through | Sequence[Through | None] | None = None) -> Iterator[int]:
        """Move the streams through the next layer, one after another, its parameters on the device meanwhile.

        Args:
            through: how the layer runs, for all streams or for each; None where it runs as the model has it.

        Yields:
            The index of each stream after it moved.

        Raises:
            ModelError: A hidden state is not finite.
        """
        layer = self.next_layer
        self.number += 1
        per_stream = through if isinstance(through, Sequence) else [through] * len(self.streams)
        count = Counter(map(id, self.streams))
        moved: dict[int, Stream] = {}  # of what is there several times
        with layer_on_device(self._loaded, layer):
            for index, how in enumerate(per_stream):
                stream = self.streams[index]
                if how is not None:
                    self.streams[index] = how(layer, stream)
                elif count[id(stream)] == 1:
                    self.streams[index] = layer.dense(stream)
                else:
                    self.streams[index] = moved.get(id(stream)) or moved.setdefault(id(stream), layer.dense(stream))
                del stream
                yield index

    def move(self, through: Through | Sequence[Through | None] | None = None) -> None:
        """Move all streams through the next layer, as `moving` does."""
        for _ in self.moving(through):
            pass

    def move_to(self, number: int) -> None:
        """Move all streams to where a layer comes next, or to the end, as the model has it."""
        while self.number < number:
            self.move()
