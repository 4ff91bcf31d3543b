"""Build a Hugging Face causal LM from its config, and replace its weights by their names.

The backends use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from async_rl.data.chat import check_causal_lm
from async_rl.data.model_config import read_model_config
from async_rl.errors import ModelError, WeightsError
from async_rl.weights.manifest import digest_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_model(
    directory: Path, *, device: torch.device, dtype: torch.dtype, load_pretrained: bool = False
) -> PreTrainedModel:
    """Build the model that ``directory`` describes, in evaluation mode.

    With ``load_pretrained`` it has the weights in ``directory``. Otherwise its weights are uninitialised memory.

    Raises:
        ModelError: the config is unreadable, this backend can't run the model, or the stored weights are missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = read_model_config(directory)
    refuse_unsupported(config)
    check_causal_lm(directory)
    model: Any
    try:
        if load_pretrained:
            model = AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
            )
            model = model.to(device)
        else:
            with torch.device(device), no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            model.tie_weights()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"can't build the model in {directory}: {error}; correct model.path, or use another model"
        ) from error
    return model.eval().requires_grad_(False)


def describe_model(directory: Path) -> PreTrainedModel:
    """Build the model that ``directory`` describes without memory for its weights.

    It serves only to look up the names, shapes and ties of its parameters.

    Raises:
        ModelError: the config is unreadable, is not of a causal LM, or is of a quantised one.
    """
    from transformers import AutoModelForCausalLM

    config = read_model_config(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{directory / 'config.json'} has a quantization_config, but a version's tensors can't become quantised "
            f"weights; use the unquantised model that it was made from"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"can't build the model of {directory}: {error}; correct its config.json, or install the version of "
            f"transformers that it needs"
        ) from error
    return model


def stored_weights(directory: Path, dtype: str) -> Mapping[str, Tensor]:
    """Return the weights in ``directory`` on the CPU, as a version of them has them, computed in ``dtype``.

    Raises:
        ModelError: as for ``build_model``.
    """
    model = build_model(directory, device=torch.device("cpu"), dtype=getattr(torch, dtype), load_pretrained=True)
    return WeightTable(model).tensors


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise ModelError if the model is quantised, not only a decoder, or changes its own weights.

    ``self_test.choose_rows`` refuses models that this backend would sample wrongly, when it has their weights.
    """
    quantization: Any = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"the transformers backend runs full weights, got a model quantised by {method}; use the unquantised "
            f"model that it was made from"
        )
    if getattr(config, "rescale_every", 0):
        raise ModelError(
            f"{config.model_type!r} with rescale_every = {config.rescale_every} divides its weights in place "
            f"when it samples, which new versions of the weights would not be; set rescale_every = 0 in config.json"
        )
    if config.is_encoder_decoder:
        raise ModelError(
            f"the transformers backend runs decoders, got {config.model_type!r}, which has an encoder too; use another "
            f"model"
        )


class WeightTable:
    """The model's parameters and persistent buffers by their state-dict names.

    It checks new weights and puts them into the model. ``tensors`` has the present ones.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        every_name = dict(model.named_parameters(remove_duplicate=False))
        # A tied weight (an output head that is the embedding) has several names. Use the first.
        self._aliases = {name: names[id(p)] for name, p in every_name.items() if name not in self._parameters}
        stored = model.state_dict()
        self._buffers: dict[str, Tensor] = {name: b for name, b in model.named_buffers() if name in stored}
        self.tensors = self._parameters | self._buffers

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Check that ``weights`` has the names, shapes and ties of the model's parameters and persistent buffers.

        Raises:
            WeightsError: a tensor is missing, unknown, of another shape, or differs from the one to which it is tied.
        """
        missing = sorted(self.tensors.keys() - weights.keys())
        unknown = sorted(weights.keys() - self.tensors.keys() - self._aliases.keys())
        if adapters := [name for name in unknown if ".lora_" in name]:
            raise WeightsError(
                f"expected merged weights from the learner, got {len(adapters)} tensors of LoRA adapters, "
                f"{adapters[0]} among them; this is a bug in async-rl, please report it"
            )
        if missing or unknown:
            raise WeightsError(
                f"expected the {len(self.tensors)} tensors of the generator's model, got {len(weights)} from the "
                f"learner: missing {missing[:5]}, unknown {unknown[:5]}; learner and generator must run one "
                f"model config with one version of transformers"
            )
        for name, tensor in self.tensors.items():
            if weights[name].shape != tensor.shape:
                raise WeightsError(
                    f"{name}: expected shape {list(tensor.shape)}, got {list(weights[name].shape)} from the "
                    f"learner; learner and generator must run one model config with one version of transformers"
                )
        for alias, name in self._aliases.items():
            if alias in weights and not torch.equal(weights[alias], weights[name]):
                raise WeightsError(
                    f"{alias} is tied to {name} by the generator's model config, but the learner sent two tensors that "
                    f"differ; both must run one model config with one version of transformers"
                )

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor's present bytes, by the tensor's name."""
        return {name: digest_bytes(_bytes_of(tensor)) for name, tensor in self.tensors.items()}

    def replace(self, weights: Mapping[str, Tensor], *, copy: bool = False) -> None:
        """Give the model ``weights`` as its parameters and buffers.

        Parameters keep the model's dtype, and buffers get that of ``weights``, because the learner computes in it.
        Tensors on the model's device that need no other dtype are shared with the caller, unless ``copy``. All others
        are copied.
        """
        for name, parameter in self._parameters.items():
            tensor = weights[name]
            if parameter.device == tensor.device and not copy:
                parameter.data = tensor.detach().to(parameter.dtype)
            else:
                parameter.data.copy_(tensor, non_blocking=True)
        for name, buffer in self._buffers.items():
            buffer.data = weights[name].detach().to(buffer.device, copy=copy)
        for device in {p.device for p in self._parameters.values() if p.device.type == "cuda"}:
            # The caller may reuse the tensors after this call, so wait for the copies.
            torch.cuda.synchronize(device)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
