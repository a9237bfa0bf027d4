"""What config.json of public checkpoints says, and which tensors of theirs hold ours."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.models.model import Inputs
from tokmill.models.public.huggingface import architecture, public_of, read_config
from tokmill.models.public.public import (
    GPT2_NAMES,
    LLAMA_NAMES,
    from_public,
    to_public,
)
from tokmill.models.public.public_decoders import GPT2, Llama
from tokmill.models.transformers.attention import RopeScaling
from tokmill.models.transformers.transformer import Decoder, DecoderConfig, EncoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.training.runs.exchange import end_ids

GPT2_SMALL = {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA_SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERT_SMALL = {
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GPT2_LIKE = DecoderConfig(
    norm="layer", position="learned", activation="gelu_tanh", bias=True, context=16, dim=8,
    layers=2, heads=2, hidden=32,
)  # fmt: skip
LLAMA_LIKE = DecoderConfig(dim=8, layers=2, heads=2, hidden=24)

GPT2_HEAD, LLAMA_HEAD = GPT2.heads["GPT2LMHeadModel"], Llama.heads["LlamaForCausalLM"]


def state_of(config: DecoderConfig, tied: bool) -> dict[str, Tensor]:
    """The state dict of a task, every number another one."""
    model = Decoder(config, Inputs({"token": 5}))
    task = NextToken(NextTokenConfig(length=4, tied=tied), model, Inputs({"token": 5}))
    first = 0
    for parameter in task.parameters():
        values = torch.arange(first, first + parameter.numel(), dtype=torch.float32)
        parameter.data.copy_(values.reshape(parameter.shape))
        first += parameter.numel()
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


def test_keys_of_gpt2() -> None:
    public, decoder = read_config(GPT2_SMALL, "")
    assert isinstance(public, GPT2) and public.length == 1024 and public.vocab_size == 50_257
    assert public.tie_word_embeddings
    assert decoder == msgspec.structs.replace(GPT2_LIKE, context=1024)
    _, decoder = read_config({**GPT2_SMALL, "n_inner": 20, "activation_function": "gelu"}, "")
    assert (decoder.hidden, decoder.activation) == (20, "gelu")


def test_keys_of_llama() -> None:
    public, decoder = read_config(LLAMA_SMALL, "")
    assert isinstance(public, Llama) and public.length == 2048 and not public.tie_word_embeddings
    assert decoder == msgspec.structs.replace(LLAMA_LIKE, norm_eps=1e-6)
    keys = {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": True, "mlp_bias": True}
    _, decoder = read_config({**LLAMA_SMALL, **keys}, "")
    assert (decoder.kv_heads, decoder.head_dim, decoder.bias) == (1, 6, True)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_both_ways_to_write_the_base_of_rotary_positions(keys: dict[str, Any]) -> None:
    assert read_config({**LLAMA_SMALL, **keys}, "")[1].rope_theta == 5e5


def test_lowered_frequencies_go_there_and_back() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    _, decoder = read_config({**LLAMA_SMALL, "rope_scaling": scaling}, "")
    assert decoder.rope_scaling == RopeScaling(factor=32.0, original_context=4096)
    config = public_of(decoder, 5, tied=True, length=16).to_config()
    assert config["rope_scaling"] == scaling
    del scaling["factor"]
    with pytest.raises(TokmillError, match=r"rope_scaling.factor"):
        read_config({**LLAMA_SMALL, "rope_scaling": scaling}, "")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function = 'relu'"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights = False"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True",
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention = True"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"model_type": "llama", "attention_bias": True}, "(True, False)"),
        ({"model_type": "llama", "mlp_bias": True}, "(False, True)"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type = 'yarn'",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters.rope_type = 'linear'",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(TokmillError) as refused:
        read_config(keys, "config.json")
    assert named in refused.value.what and refused.value.where == "config.json"


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mamba"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"architectures": []},
    ],
)
def test_another_architecture_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(TokmillError, match="is not known"):
        read_config(keys, "")


@pytest.mark.parametrize(
    ("key", "value"), [("resid_pdrop", 0.1), ("pad_token_id", -1), ("bos_token_id", None)]
)
def test_keys_that_the_model_does_not_read(key: str, value: Any) -> None:
    assert read_config({**GPT2_SMALL, key: value}, "") == read_config(GPT2_SMALL, "")


@pytest.mark.parametrize(
    ("named", "ends"), [([0, -2], {}), (-1, {}), ([0, 7], {"token": (0, 7)}), ([0, 10], {})]
)
def test_ends_of_a_text_are_ids_of_the_vocabulary(named: Any, ends: dict[str, Any]) -> None:
    config = {"eos_token_id": named}
    assert end_ids(config, None, {"eot": "eos_token_id"}, 10, [0]) == ends


def test_a_key_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TokmillError, match=r"\$.n_embd"):
        read_config({**GPT2_SMALL, "n_embd": "8"}, "")


@pytest.mark.parametrize("decoder", [GPT2_LIKE, LLAMA_LIKE])
def test_config_goes_there_and_back(decoder: DecoderConfig) -> None:
    public = public_of(decoder, 5, tied=False, length=16)
    again, config = read_config(public.to_config(), "")
    assert again == public and (again.vocab_size, again.length) == (5, 16)
    assert public_of(config, 5, tied=False, length=16) == public


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"norm": "rms", "activation": "gelu"},
            "LlamaForCausalLM with model.activation = 'swiglu'",
        ),
        ({"dim": 9, "head_dim": 4}, "LlamaForCausalLM with model.dim = 8"),
        ({"norm": "layer"}, "LlamaForCausalLM with model.norm = 'rms'"),
    ],
)
def test_a_mixture_has_no_public_counterpart(keys: dict[str, Any], named: str) -> None:
    decoder = msgspec.structs.replace(LLAMA_LIKE, **keys)
    with pytest.raises(TokmillError) as refused:
        public_of(decoder, 5, tied=True, length=16, where="run")
    assert named in refused.value.hint and "GPT2LMHeadModel with" in refused.value.hint


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config", "layout"),
    [(GPT2_LIKE, GPT2_NAMES), (LLAMA_LIKE, LLAMA_NAMES)],
)
def test_tensors_go_there_and_back(config: DecoderConfig, layout: Any, tied: bool) -> None:
    head = GPT2_HEAD if layout is GPT2_NAMES else LLAMA_HEAD
    state = state_of(config, tied)
    public = to_public(state, layout, head, "token")
    assert sum(t.numel() for t in public.values()) == sum(t.numel() for t in state.values())
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    short = {name.removeprefix(layout.base): tensor for name, tensor in public.items()}
    for tensors in (public, short):
        again = from_public(tensors, layout, head, own, "token", "")
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)


def test_what_follows_from_the_configuration_is_left_out() -> None:
    state = state_of(GPT2_LIKE, tied=True)
    public = to_public(state, GPT2_NAMES, GPT2_HEAD, "token")
    more = {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    # A tied head that is written out a second time says nothing new.
    more["lm_head.weight"] = public["transformer.wte.weight"].clone()
    assert (
        from_public(public | more, GPT2_NAMES, GPT2_HEAD, state, "token", "").keys() == state.keys()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.0.mlp.up_proj.weight": None}, "lacks the tensors layers.0.mlp.up_proj"),
        ({"model.layers.2.extra": torch.ones(1)}, "also holds the tensors layers.2.extra"),
        ({"model.norm.weight": torch.ones(9)}, r"'norm.weight' is .* of \[9\]; .* of \[8\]"),
        ({"model.norm.weight": torch.ones(8, dtype=torch.int8)}, "'norm.weight' is torch.int8"),
        ({"lm_head.weight": torch.ones(5, 8)}, "the head is tied"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor | None], said: str) -> None:
    state = state_of(LLAMA_LIKE, tied=True)
    changed = to_public(state, LLAMA_NAMES, LLAMA_HEAD, "token") | change
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(TokmillError, match=said) as refused:
        from_public(tensors, LLAMA_NAMES, LLAMA_HEAD, state, "token", "folder")
    assert refused.value.where == "folder" and refused.value.hint


def test_keys_of_bert() -> None:
    public, model = read_config(
        {**BERT_SMALL, "layer_norm_eps": 1e-6, "hidden_act": "gelu_new"}, ""
    )
    assert isinstance(model, EncoderConfig) and public.length == 16
    assert model == EncoderConfig(
        dim=8, layers=2, heads=2, hidden=12, context=16, norm_eps=1e-6, activation="gelu_tanh"
    )
    # Absent keys are those of BERT base.
    assert read_config({"model_type": "bert"}, "")[1] == EncoderConfig(
        **EncoderConfig.sizes["base"]
    )
    assert read_config({"model_type": "distilbert"}, "")[1] == EncoderConfig(
        **EncoderConfig.sizes["distilbert"]
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"model_type": "bert", "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"model_type": "bert", "type_vocab_size": 16}, "type_vocab_size = 16"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder = True"),
        ({"model_type": "bert", "add_cross_attention": True}, "add_cross_attention = True"),
        ({"model_type": "distilbert", "activation": "relu"}, "activation = 'relu'"),
    ],
)
def test_what_no_encoder_can_be_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(TokmillError) as refused:
        read_config(keys, "config.json")
    assert named in refused.value.what and refused.value.where == "config.json"


@pytest.mark.parametrize(
    ("model", "task", "segments"),
    [
        (EncoderConfig(dim=8, heads=2), "sentence_pair", True),
        (EncoderConfig(dim=8, heads=2, activation="gelu_tanh"), "masked", True),
        (EncoderConfig(dim=8, heads=2), "masked", False),
    ],
)
def test_config_of_encoders_goes_there_and_back(model: Any, task: str, segments: bool) -> None:
    public = public_of(model, 5, tied=False, length=16, task=task, segments=segments)
    again, config = read_config(public.to_config(task), "")
    assert again == public and again.vocab_size == 5 and again.segments == segments
    assert architecture(public.to_config(task), "")[1].task == task
    without = {"hidden": 0, "context": 0}
    assert msgspec.structs.replace(config, **without) == msgspec.structs.replace(model, **without)


@pytest.mark.parametrize(
    ("model", "task", "segments", "hint"),
    [
        (EncoderConfig(norm_place="pre"), "masked", True, "model.norm_place = 'post'"),
        (EncoderConfig(norm_eps=1e-5), "masked", False, "norm_eps = 1e-12"),
        (EncoderConfig(norm_eps=1e-5), "masked", False, "BertForMaskedLM with a segment of tokens"),
        (EncoderConfig(), "sentence_pair", False, "BertForPreTraining with a segment of tokens"),
        (EncoderConfig(), "classify", True, "-o F.pt"),
        (LLAMA_LIKE, "masked", False, "-o F.pt"),
    ],
)
def test_encoders_without_a_public_counterpart(
    model: Any, task: str, segments: bool, hint: str
) -> None:
    with pytest.raises(TokmillError) as refused:
        public_of(model, 5, tied=True, length=16, where="run", task=task, segments=segments)
    assert hint in refused.value.hint
