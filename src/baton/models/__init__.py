"""Target models: one file per architecture, loaded from Hugging Face checkpoint directories."""

from baton.models.base import CausalLM
from baton.models.cache import Attend, KVLayerSpec
from baton.models.loading.loader import fingerprint, load_model
from baton.models.loading.stored import read_config

__all__ = ["Attend", "CausalLM", "KVLayerSpec", "fingerprint", "load_model", "read_config"]
