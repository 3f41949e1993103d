"""Connectors that let copies of layers run during a forward, for `kv_connector_module_path`."""

from __future__ import annotations

import time
from typing import Any

from baton.vllm import layer_stream
from baton.vllm.connector import BatonConnector

PAUSE_S = 0.1
layer_stream.MIN_BYTES = 1


class Waiting(BatonConnector):
    """Pauses after each layer of a prompt that is streamed, so that copies can end before the next layer is written."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """As vLLM calls it."""
        self.say(layer_name)
        stream = self.worker._layers
        if stream is not None and stream._prompts and layer_name in stream._names:
            time.sleep(PAUSE_S)

    def say(self, layer_name: str) -> None:
        """Report the layer to the worker's half."""
        self.worker.layer_written(layer_name)


class Early(Waiting):
    """Reports after each layer that the next one is written too."""

    def say(self, layer_name: str) -> None:
        """Report the layer and the next to the worker's half."""
        stream = self.worker._layers
        assert stream is not None
        names = [layer.name for layer in stream._layers]
        if layer_name in names:
            at = names.index(layer_name)
            for name in names[:2] if at == 0 else names[at + 1 : at + 2]:
                self.worker.layer_written(name)
