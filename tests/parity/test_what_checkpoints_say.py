"""What the files of a checkpoint say beside its weights: end ids, kinds of outputs, model types."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokmill.base.errors import TokmillError
from tokmill.inference.sample import generate
from tokmill.models.public.huggingface import read_config
from tokmill.training.runs.exchange import export_model, import_model
from tokmill.training.runs.run import read_run

transformers: Any = pytest.importorskip("transformers")
torch.set_num_threads(1)
SIZE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def changed(folder: Path, **keys: Any) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **keys}))


def greedy(folder: Path, ids: list[int], tokens: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False
    )
    return [int(one) for one in made[0, len(ids) :]]


@pytest.mark.parametrize(
    ("config", "generation"),
    [(7, None), ([7, 9], None), ([9, 7], [9, 7]), (7, [7, 9]), (7, [9]), ([7, 9], 9), (None, 9)],
)
def test_a_text_ends_where_transformers_ends_it(
    config: Any, generation: Any, tmp_path: Path
) -> None:
    """A model that counts: each id is followed by the next one."""
    size = {**SIZE, "hidden_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, eos_token_id=config))
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(32))
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.fill_(1)
        model.lm_head.weight.copy_(torch.eye(32).roll(1, 0))
    if generation is not None:
        model.generation_config.eos_token_id = generation
    model.save_pretrained(tmp_path / "m")
    wanted = greedy(tmp_path / "m", [3], 12)
    run = import_model(tmp_path / "m", tmp_path / "run").path
    export_model(run, tmp_path / "out")
    assert greedy(tmp_path / "out", [3], 12) == wanted
    (found,) = generate(run, [[3]], 12, temperature=0, device="cpu")
    # The end is not a part of a continuation.
    assert found.ids["token"] + [wanted[-1]] * (found.end == "eot") == wanted
    assert (found.end == "eot") == (len(wanted) < 12)


def test_the_type_of_a_model_decides_and_not_a_leftover_name(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).save_pretrained(tmp_path / "m")
    # Qwen2 has biases that no Llama here has; transformers reads this file as Qwen2.
    changed(tmp_path / "m", model_type="qwen2")
    with pytest.raises(TokmillError, match="'LlamaForCausalLM' of the model 'qwen2' is not known"):
        import_model(tmp_path / "m", tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("gpt2", {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}),
        ("distilbert", {"hidden_size": "dim", "num_hidden_layers": "n_layers"}),
    ],
)
def test_the_other_names_of_transformers_are_read(
    kind: str, own: dict[str, str], tmp_path: Path
) -> None:
    """The number of heads is in no shape: 12 by default, where its other name is not read."""
    heads = "n_head" if kind == "gpt2" else "n_heads"
    said = {"model_type": kind, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    _, model = read_config(said, "here")
    assert (model.dim, model.layers, model.heads) == (24, 1, 2)
    assert [getattr(theirs, key) for key in (*own.values(), heads)] == [24, 1, 2]
    with pytest.raises(TokmillError, match=rf"{heads}, num_attention_heads = \(4, 2\)"):
        read_config({**said, heads: 4}, "here")


def test_quantized_weights_are_not_called_damaged(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
    model.save_pretrained(tmp_path / "m")
    state = {name: one.clone() for name, one in model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "m/model.safetensors", {"format": "pt"})
    with pytest.raises(TokmillError, match="F8_E4M3, which is not read: the model is quantized"):
        import_model(tmp_path / "m", tmp_path / "run")


def test_the_index_says_which_file_has_a_tensor(tmp_path: Path) -> None:
    """Files that are used again hold older values of tensors that others have now."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).save_pretrained(
        tmp_path / "m", max_shard_size="5KB"
    )
    import_model(tmp_path / "m", tmp_path / "run")
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())["weight_map"]
    first, *_, last = sorted({*index.values()})
    tensors = {file: load_file(tmp_path / "m" / file) for file in (first, last)}
    for file, other in ((first, last), (last, first)):
        old = {name: value + 1 for name, value in tensors[other].items()}
        save_file({**old, **tensors[file]}, tmp_path / "m" / file, {"format": "pt"})
    (name, _), *_ = ((name, file) for name, file in index.items() if file == first)
    spare = {key: one for key, one in tensors[first].items() if key != name}
    # One that is in another file than the index says is still there.
    save_file(
        {**load_file(tmp_path / "m" / last), name: tensors[first][name]},
        tmp_path / "m" / last,
        {"format": "pt"},
    )
    save_file(spare, tmp_path / "m" / first, {"format": "pt"})
    import_model(tmp_path / "m", tmp_path / "again")
    weights = "model/model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "run" / weights).read_bytes()


def test_a_template_stands_before_prompts_of_an_imported_run(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    one: Any = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.add_special_tokens(["<s>", "</s>"])
    one.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", one.token_to_id("<s>"))]
    )
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZE, "vocab_size": 260})
    ).save_pretrained(tmp_path / "m")
    one.save(str(tmp_path / "m/tokenizer.json"))
    import_model(tmp_path / "m", tmp_path / "run")
    facts = read_run(tmp_path / "run")[1]
    assert list(facts.prefix["token"]) == one.encode("").ids == [one.token_to_id("<s>")]
