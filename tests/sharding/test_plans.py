from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import commfuse_fx as cf
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.sharding.marking.marks import collect
from commfuse_fx.sharding.marking.strategy import Placements
from tests.sharding.tracing import activation_layouts, parameter_layouts, resolved

MESH = Mesh((2, 2), ("dp", "tp"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, ids):
        hidden = self.norm(self.embed(ids))
        return hidden + self.down(torch.relu(self.up(input=hidden)))


def ids():
    return torch.zeros(4, 8, dtype=torch.int64)


def both(net, plan, axis=None, mesh=MESH):
    found = resolved(cf.shard(net, plan, axis=axis), mesh, ids())
    return parameter_layouts(found), activation_layouts(found), activation_layouts(found, gradient=True)


# Styles of torch.


def test_columns_and_rows_of_linear_layers():
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parameters, forward, backward = both(Net(), plan, "tp")
    assert parameters == {
        "up.weight": "S(0) on tp",
        "up.bias": "S(0) on tp",
        "down.weight": "S(1) on tp",
        "down.bias": "R on tp",
    }
    assert forward == {
        "up in0": "R on tp",
        "up out0": "S(2) on tp",
        "down in0": "S(2) on tp",
        "down out0": "R on tp",
    }
    # What has to be whole in the forward pass may have a gradient in summands.
    assert backward == {"up out0": "S(2) on tp", "down in0": "S(2) on tp"}


def test_the_last_axis_is_the_default():
    assert both(Net(), {"up": ColwiseParallel()})[0]["up.weight"] == "S(0) on tp"
    assert both(Net(), {"up": ColwiseParallel()}, "dp")[0]["up.weight"] == "S(0) on dp"
    assert both(Net(), {"up": ColwiseParallel()}, mesh=Mesh((4,), ("dp",)))[0]["up.weight"] == "S(0) on dp"


def test_a_layer_without_bias_and_one_style_for_the_module_itself():
    net = Net()
    net.up = nn.Linear(8, 16, bias=False)
    cf.shard(net.up, ColwiseParallel())
    cf.shard(net.down, plan=RowwiseParallel())
    found = resolved(net, MESH, ids())
    assert parameter_layouts(found) == {
        "up.weight": "S(0) on tp",
        "down.weight": "S(1) on tp",
        "down.bias": "R on tp",
    }


@pytest.mark.parametrize(
    ("style", "weight", "forward"),
    [
        (ColwiseParallel(), "S(1) on tp", {"embed in0": "R on tp", "embed out0": "S(2) on tp"}),
        (RowwiseParallel(), "S(0) on tp", {"embed in0": "R on tp", "embed out0": "R on tp"}),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "S(0) on tp",
         {"embed in0": "R on tp", "embed out0": "S(1) on tp"}),
    ],
)  # fmt: skip
def test_embeddings(style, weight, forward):
    parameters, found, _ = both(Net(), {"embed": style})
    assert parameters == {"embed.weight": weight}
    assert found == forward


def layers(net, plan):
    """(subject, position) -> the layouts that follow one another, forward and backward."""
    from commfuse_fx.sharding.marking.layout_op import mark_of

    found = resolved(cf.shard(net, plan), MESH, ids())
    steps: dict[str, list[str]] = {}
    for node, layout in found.activations.items():
        mark = mark_of(node)
        where = f"{'d ' if mark.gradient else ''}{mark.subject} {mark.position}"
        steps.setdefault(where, []).append(str(layout))
    return steps


def test_sequence_parallel_torch_styles():
    plan = {
        "embed": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    net = Net()
    assert layers(net, plan) == {
        "embed in0": ["R on tp"],
        "embed out0": ["S(1) on tp"],
        "d embed out0": ["S(1) on tp"],
        "norm in0": ["S(1) on tp"],
        "norm out0": ["S(1) on tp"],
        "d norm in0": ["S(1) on tp"],
        "d norm out0": ["S(1) on tp"],
        "up in0": ["S(1) on tp", "R on tp"],
        "up out0": ["S(2) on tp"],
        "d up in0": ["S(1) on tp"],
        "d up out0": ["S(2) on tp"],
        "down in0": ["S(2) on tp"],
        "down out0": ["S(1) on tp"],
        "d down in0": ["S(2) on tp"],
        "d down out0": ["S(1) on tp"],
    }
    assert parameter_layouts(resolved(net, MESH, ids()))["norm.weight"] == "R on tp"


def test_prepared_inputs_and_outputs():
    prepare = PrepareModuleInputOutput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        output_layouts=Partial(),
        desired_output_layouts=Shard(1),
    )
    found = layers(Net(), {"norm": prepare})
    assert found == {
        "norm in0": ["S(0) on tp", "R on tp"],
        "norm out0": ["S(1) on tp"],
        "d norm in0": ["S(0) on tp"],
        "d norm out0": ["S(1) on tp"],
    }


def test_prepared_keywords():
    prepare = PrepareModuleInput(
        input_kwarg_layouts={"input": Shard(1)}, desired_input_kwarg_layouts={"input": Replicate()}
    )
    found = layers(
        Net(), {"up": prepare, "down": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1))}
    )
    assert found == {
        "up in:input": ["S(1) on tp", "R on tp"],
        "d up in:input": ["S(1) on tp"],
        "down out0": ["S(1) on tp"],
        "d down out0": ["S(1) on tp"],
    }


class Odd(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"norm": ColwiseParallel()}, ConfigTypeError,
         "ColwiseParallel of module norm: the module is a LayerNorm; this style is for nn.Linear and nn.Embedding"),
        ({"up": Odd()}, ConfigTypeError, "Odd of module up is not known; use ColwiseParallel, RowwiseParallel"),
        ({"up": RowwiseParallel(output_layouts=Partial())}, ConfigValueError,
         "RowwiseParallel of module up is Partial(sum): a mark cannot ask for partial sums"),
        ({"uup": ColwiseParallel()}, ConfigValueError, "pattern 'uup' matches no module and no parameter of Net; near "
         "are up"),
        ({"up": (2, 1)}, ConfigTypeError, "plan['up'] is (2, 1), but the pattern names modules; give "
         "cf.plans.Layouts(...) or a style"),
        ({"up.weight": ColwiseParallel()}, ConfigTypeError, "but the pattern names parameters; give a strategy"),
        ({3: ColwiseParallel()}, ConfigTypeError, "plan has the key 3; give path patterns as keys"),
        ({"up": cf.plans.Layouts(parameters={"w": (2, 1)})}, ConfigValueError,
         "module up has no parameter 'w', which is marked (2, 1); it has weight, bias"),
    ],
)  # fmt: skip
def test_bad_plans_are_refused(plan, error, message):
    with pytest.raises(error, match=rf"test_plans\.py:\d+: .*{re.escape(message)}"):
        cf.shard(Net(), plan)


def test_an_axis_that_is_no_name():
    with pytest.raises(ConfigTypeError, match="axis is 1; give the name of a mesh axis"):
        cf.shard(Net(), {"up": ColwiseParallel()}, axis=1)


def test_own_plans_take_every_notation():
    layouts = cf.plans.Layouts(in_strategy=((2, 1, 1),), out_strategy=((2, 1, 2),), parameters={"weight": (2, 1)})
    parameters, forward, _ = both(Net(), {"up": layouts, "down.weight": (None, "tp"), "**.bias": {"tp": "R"}})
    assert parameters == {
        "up.weight": "R on dp, S(0) on tp",
        "up.bias": "R on tp",
        "down.weight": "R on dp, S(1) on tp",
        "norm.bias": "R on tp",
        "down.bias": "R on tp",
    }
    assert forward == {"up in0": "S(0) on dp, R on tp", "up out0": "S(0) on dp, S(2) on tp"}


# Ready-made plans.


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def gpt2(transformers):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(transformers):
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=32, vocab_size=16,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama(transformers):
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=16, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


GPT2 = {
    "attn.c_attn.weight": "S(1;3) on tp",
    "attn.c_attn.bias": "S(0;3) on tp",
    "attn.c_proj.weight": "S(0) on tp",
    "attn.c_proj.bias": "R on tp",
    "mlp.c_fc.weight": "S(1) on tp",
    "mlp.c_fc.bias": "S(0) on tp",
    "mlp.c_proj.weight": "S(0) on tp",
    "mlp.c_proj.bias": "R on tp",
}
BERT = {
    **{f"attention.self.{name}.weight": "S(0) on tp" for name in ("query", "key", "value")},
    **{f"attention.self.{name}.bias": "S(0) on tp" for name in ("query", "key", "value")},
    "attention.output.dense.weight": "S(1) on tp",
    "attention.output.dense.bias": "R on tp",
    "intermediate.dense.weight": "S(0) on tp",
    "intermediate.dense.bias": "S(0) on tp",
    "output.dense.weight": "S(1) on tp",
    "output.dense.bias": "R on tp",
}
LLAMA = {
    **{f"self_attn.{name}.weight": "S(0) on tp" for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj.weight": "S(1) on tp",
    "mlp.gate_proj.weight": "S(0) on tp",
    "mlp.up_proj.weight": "S(0) on tp",
    "mlp.down_proj.weight": "S(1) on tp",
}
MODELS = [(gpt2, "transformer.h", GPT2), (bert, "bert.encoder.layer", BERT), (llama, "model.layers", LLAMA)]


def in_blocks(prefix, layouts):
    return {f"{prefix}.{i}.{name}": layout for i in range(2) for name, layout in layouts.items()}


@pytest.mark.parametrize(("make", "prefix", "layouts"), MODELS)
def test_tensor_parallel(transformers, make, prefix, layouts):
    model = make(transformers)
    plan = cf.plans.tensor_parallel(model)
    assert all(pattern.startswith(f"{prefix}.*.") for pattern in plan)
    found = resolved(cf.shard(model, plan), MESH, ids())
    assert parameter_layouts(found) == in_blocks(prefix, layouts)
    assert not found.activations
    assert found.data_axes == ("dp",)


@pytest.mark.parametrize(
    ("make", "name", "also"),
    [
        (gpt2, "transformer.wte.weight", {}),
        (bert, "bert.embeddings.word_embeddings.weight", {"cls.predictions.bias": "S(0) on dp"}),
        (llama, "model.embed_tokens.weight", {"lm_head.weight": "S(0) on dp"}),
    ],
)
def test_vocabulary_over_another_axis(transformers, make, name, also):
    model = make(transformers)
    cf.shard(model, cf.plans.tensor_parallel(model, axis="dp", vocabulary=True))
    found = parameter_layouts(resolved(model, MESH, ids()))
    assert {key: layout for key, layout in found.items() if key == name or key in also} == {name: "S(0) on dp", **also}
    assert all("tp" not in layout for layout in found.values())


@pytest.mark.parametrize(
    ("make", "prefix", "norms", "columns", "rows", "outside"),
    [
        (gpt2, "transformer.h", ("ln_1", "ln_2"), ("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj"),
         ("transformer.ln_f in0", "transformer.ln_f out0", "transformer.wte out0")),
        (bert, "bert.encoder.layer", ("attention.output.LayerNorm", "output.LayerNorm"),
         ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
         ("attention.output.dense", "output.dense"),
         ("bert.embeddings.LayerNorm in0", "bert.embeddings.LayerNorm out0", "bert.embeddings.word_embeddings out0",
          "cls.predictions.transform.LayerNorm in0", "cls.predictions.transform.LayerNorm out0")),
        (llama, "model.layers", ("input_layernorm", "post_attention_layernorm"),
         ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
         ("self_attn.o_proj", "mlp.down_proj"), ("model.norm in0", "model.norm out0", "model.embed_tokens out0")),
    ],
)  # fmt: skip
def test_sequence_parallel(transformers, make, prefix, norms, columns, rows, outside):
    model = make(transformers)
    cf.shard(model, cf.plans.tensor_parallel(model, axis="tp", sequence=True))
    found = resolved(model, MESH, ids())
    divided = {f"{norm} {position}": "S(1) on tp" for norm in norms for position in ("in0", "out0")}
    divided.update({f"{row} out0": "S(1) on tp" for row in rows})
    expected = in_blocks(prefix, divided)
    expected.update({f"{prefix}.{i} out0": "S(1) on tp" for i in range(2)})
    expected.update(dict.fromkeys(outside, "S(1) on tp"))
    assert activation_layouts(found, gradient=True) == expected
    whole = in_blocks(prefix, {f"{column} in0": "R on tp" for column in columns})
    assert activation_layouts(found) == expected | whole


def test_data_parallel_is_the_empty_plan():
    net = Net()
    assert cf.plans.data_parallel(net) == {}
    assert not collect(cf.shard(net, cf.plans.data_parallel(net)))


def test_a_linear_layer_in_place_of_a_conv1d():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn = nn.Linear(8, 24, bias=False)
            self.c_proj = nn.Linear(8, 8)

    plan = cf.plans.tensor_parallel(nn.ModuleDict({"h": nn.ModuleList([Attention()])}), "tp")
    assert {pattern: dict(layouts.parameters) for pattern, layouts in plan.items()} == {
        "h.*.c_attn": {"weight": Placements((("tp", S(0, 3)),))},
        "h.*.c_proj": {"weight": Placements((("tp", S(1)),)), "bias": Placements((("tp", R),))},
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Net(),), ConfigValueError, "model is a Net, in which tensor_parallel finds no blocks shaped like those of "
         "GPT-2, BERT or Llama (its linear layers: up, down). Mark it by hand: the first layer of each pair by output "
         'features, cf.shard(model, "**.first", weight=("tp", None), bias=("tp",))'),
        ((nn.ReLU(),), ConfigValueError, "(its linear layers: none)"),
        (("model",), ConfigTypeError, "model is 'model'; give a torch.nn.Module"),
        ((Net(), 1), ConfigTypeError, "axis is 1; give the name of a mesh axis, or None for the last one"),
        ((Net(), "tp", 1), ConfigTypeError, "vocabulary is 1; give True or False"),
        ((Net(), "tp", True, None), ConfigTypeError, "sequence is None; give True or False"),
    ],
)  # fmt: skip
def test_models_without_a_plan(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        cf.plans.tensor_parallel(*arguments)


def test_a_vocabulary_that_does_not_divide(transformers):
    model = gpt2(transformers)
    cf.shard(model, cf.plans.tensor_parallel(model, vocabulary=True))
    with pytest.raises(ConfigValueError, match=re.escape("dimension 0 of shape (16, 8) has size 16, which does not")):
        resolved(model, Mesh((3,), ("tp",)), ids())
