"""Networks and tokenizers of transformers from folders: tokens, losses, padding, and safety."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import read_rows, refuses
from harness import ArrayData, assert_near, final_weights, sgd, train_rounds, weights
from plain_reference import batches
from safetensors.torch import load_file, save_file

from gcfed.data.sets.huggingface import huggingface
from gcfed.models.huggingface import huggingface_net
from gcfed.run import train

pytest.importorskip("transformers")
from tiny_folders import folders


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("hub"))


def net_of(root, name, last_only=True, **settings):
    return (
        huggingface_net(
            folder=str(root / name),
            input_shape=[10],
            num_classes=3 if last_only else 32,
            last_only=last_only,
            **settings,
        )
        .double()
        .eval()
    )


# ------------------------------------------------------------------------------------------- tokens
def test_texts_become_tokens_labelled_with_a_class_or_the_next_token(root, tmp_path):
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    rows = load_from_disk(root / "texts")
    words = AutoTokenizer.from_pretrained(root / "tokenizer")
    read = partial(
        huggingface, str(root / "texts"), str(tmp_path), tokenizer=str(root / "tokenizer"), length=7
    )
    dataset = read(groups="user", test=0.01)  # one sample
    whole = {
        (user, tuple(words(text)["input_ids"]))
        for user, text in zip(rows["user"], rows["text"], strict=True)
    }
    for user, x in zip(dataset.train.groups, dataset.train.x, strict=True):
        if -1 in x:  # padding comes first
            assert (int(user), tuple(x[x >= 0].tolist())) in whole
            assert (x[: 7 - (x >= 0).sum()] == -1).all()
        assert x[x >= 0][0] == 1  # a shortened text keeps its special tokens
        assert x[-1] == 2
    assert dataset.train.x.dtype == np.int32
    assert dataset.num_classes == 2

    model = read(groups="user", next_token=True, test=1e-6)
    assert model.num_classes == 32
    assert model.train.x.shape[1] == 7
    assert model.train.y.shape == model.train.x.shape
    # every token but the first is a label
    count = sum(len(words(text)["input_ids"]) - 1 for text in rows["text"])
    assert sum((split.y >= 0).sum() for split in (model.train, model.test)) == count
    x = model.train.x
    y = model.train.y
    assert ((y < 0) | (x >= 0)).all()
    following = y[:, :-1] >= 0
    np.testing.assert_array_equal(y[:, :-1][following], x[:, 1:][following])
    characters = huggingface(str(root / "texts"), str(tmp_path), next_token=True, length=7)
    assert characters.num_classes == 80
    assert characters.train.x.dtype == np.uint8


# ------------------------------------------------------------------------------------ exact numbers
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padding_on_either_side_changes_no_output_and_no_gradient(root, name):
    """The reference passes each text alone and without padding through
    transformers' own forward.
    """
    net = net_of(root, name)
    texts = [
        torch.randint(3, 32, (n,), generator=torch.Generator().manual_seed(n)) for n in (10, 4, 1)
    ]
    theirs = torch.cat([net.net(input_ids=text[None]).logits for text in texts])
    names, params = zip(*net.named_parameters(), strict=True)
    expected = torch.autograd.grad(theirs.square().sum(), params, allow_unused=True)
    for sides in ((5, 5), (10, 0), (0, 10), (0, 0)):  # the padding on both sides
        x = torch.full((3, 10 + sum(sides) // 2), -1)
        for row, text in zip(x, texts, strict=True):
            start = min(sides[0], x.shape[1] - len(text))
            row[start : start + len(text)] = text
        ours = net(x)
        assert_near(ours, theirs, 1e-12)
        found = torch.autograd.grad(ours.square().sum(), params, allow_unused=True)
        for key, a, b in zip(names, found, expected, strict=True):
            torch.testing.assert_close(
                0 if a is None else a, 0 if b is None else b, rtol=0, atol=1e-12, msg=key
            )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rounds_of_a_language_model_equal_a_plain_loop_with_its_own_loss(root, name):
    """The loop averages transformers' own loss over the tokens. Tied weights are trained once."""
    off = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if name == "gpt2" else ("attention_dropout",)
    make = partial(net_of, root, name, False, **dict.fromkeys(off, 0.0))
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 32, (12, 9), generator=g)
    for row, n in zip(tokens, torch.randint(2, 9, (12,), generator=g), strict=True):
        row[n:] = -1
    x = tokens[:, :-1]
    y = tokens[:, 1:].masked_fill(tokens[:, 1:] < 0, -100)
    data = ArrayData(x, y, np.split(np.arange(12), [3, 8]))
    solver = sgd(batch_size=4, epochs=2)
    data.num_classes = 32
    net = make()
    net.train()
    for t in range(2):
        start = weights(net)
        ends = []
        for k in range(3):
            torch.nn.utils.vector_to_parameters(start.clone(), net.parameters())
            for x_BT, y_BT in batches(data, solver, k, t):
                ids = torch.cat([x_BT, y_BT[:, -1:]], 1)  # transformers shifts the labels itself
                labels = torch.cat([torch.full((len(x_BT), 1), -100), y_BT], 1)
                loss = net.net(input_ids=ids.clamp(min=0), labels=labels).loss
                for p, grad in zip(
                    net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True
                ):
                    p.data -= 0.1 * grad
            ends.append(weights(net))
        torch.nn.utils.vector_to_parameters(torch.stack(ends).mean(0), net.parameters())
    for k in (1, 3):
        found = train_rounds(make(), data, solver, rounds=2, k=k)
        # transformers' loss is in float32
        assert_near(found, weights(net), 1e-7)


# --------------------------------------------------------------------------------------------- runs
def of(root, name, *more):
    return (
        "data=huggingface",
        f"data.name={root}/texts",
        f"data.tokenizer={root}/tokenizer",
        "data.length=10",
        f"paths.data_dir={root}/data",
        "partition=natural",
        "partition.by=user",
        "participation.num_clients=null",
        "rounds=2",
        "participation.per_round=3",
        "client.epochs=1",
        "client.batch_size=8",
        "model=huggingface",
        f"model.folder={root}/{name}",
        *more,
    )


def test_a_run_counts_tied_weights_once_and_continues_bit_for_bit(root, config, tmp_path):
    """The run has the dropout of GPT-2's config, and trains in bfloat16."""
    words = of(root, "gpt2", "data.next_token=true", "precision=bf16-mixed", "algorithm=scaffold")
    whole = train(config(*words, folder=tmp_path / "a"))
    net = whole.model.net
    assert net.lm_head.weight is net.transformer.wte.weight
    assert net.config.use_cache is False
    entries = sum(p.numel() for p in net.parameters())
    # SCAFFOLD sends twice
    assert read_rows(tmp_path / "a/metrics.csv")[0]["comm/up_bytes"] == 2 * 3 * 4 * entries
    part = config(*words, folder=tmp_path / "b")
    part.rounds = part.trainer.max_steps = 1
    train(part)
    resumed = train(config(*words, "ckpt_path=last", folder=tmp_path / "b"))
    assert torch.equal(final_weights(resumed), final_weights(whole))
    exported = load_file(tmp_path / "a/global_model.safetensors")
    assert {f"net.{name}" for name in net.state_dict()} == exported.keys()


def test_a_classifier_trains_in_stacks_and_its_head_comes_from_the_seed(root, config, tmp_path):
    off = [f"+model.{name}_dropout_prob=0.0" for name in ("hidden", "attention_probs")]
    words = of(root, "bert", "precision=64-true", *off)
    one, three = (
        train(config(*words, f"client.stack={k}", folder=tmp_path / str(k))) for k in (1, 3)
    )
    assert not three.module.traits.why_alone
    assert_near(final_weights(three), final_weights(one), 1e-9)
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(net_of(root, "gpt2").net.score.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_peft_reads_adapters_of_a_folder_and_our_networks_read_the_same_tokens(
    root, config, tmp_path
):
    peft = pytest.importorskip("peft")
    words = of(root, "gpt2", "data.next_token=true", "rounds=1")
    net = train(
        config(*words, "model.lora.rank=2", "model.lora.target=[c_attn,wte]", "client.stack=2")
    ).model.eval()
    base = net_of(root, "gpt2", False).float().net
    x = torch.arange(20).view(2, 10)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run").eval()
    assert_near(theirs(input_ids=x).logits, net(x), 0)
    lstm = [word for word in words if not word.startswith("model")]
    for model in (["lstm", "hidden=4"], ["gpt", "width=8", "depth=1", "heads=2"]):
        own = [f"model={model[0]}", *(f"model.{setting}" for setting in model[1:])]
        result = train(config(*lstm, *own, folder=tmp_path / model[0]))
        assert result.metrics["test/perplexity"] == pytest.approx(
            math.exp(result.metrics["test/loss"]), rel=1e-5
        )


# ----------------------------------------------------------------------------------------- refusals
def test_no_code_and_no_pickle_in_a_folder_is_executed(root, tmp_path):
    evil = shutil.copytree(root / "gpt2", tmp_path / "evil")
    ran = tmp_path / "ran"
    about = json.loads((evil / "config.json").read_text())
    (evil / "modeling.py").write_text(f"open({str(ran)!r}, 'w')\n")
    theirs = {"AutoModelForCausalLM": "modeling.Mine", "AutoConfig": "modeling.Theirs"}
    (evil / "config.json").write_text(
        json.dumps(about | {"auto_map": theirs, "model_type": "mine"})
    )
    with refuses(r"folder=.*evil"):
        net_of(evil, "", False)
    with refuses("trust_remote_code"):
        net_of(evil, "", False, trust_remote_code=True)
    assert not ran.exists()
    (evil / "config.json").write_text(
        json.dumps(about | {"attn_implementation": "somebody/kernel"})
    )
    assert net_of(evil, "", False).net.config._attn_implementation == "sdpa"
    torch.save(load_file(evil / "model.safetensors"), evil / "pytorch_model.bin")
    (evil / "model.safetensors").unlink()
    with refuses(r"folder=.*safetensors"):
        net_of(evil, "", False)
    with refuses(r"^tokenizer=.*nowhere"):
        huggingface(str(root / "texts"), str(tmp_path), tokenizer=str(tmp_path / "nowhere"))
    with refuses(r"^tokenizer=.*there is no tokenizer"):
        huggingface(str(root / "texts"), str(tmp_path), tokenizer=str(root / "gpt2"))
    (evil / "tokenizer.json").write_text('{"model": {"type": "Mine"}}')
    with refuses(r"^tokenizer=.*evil"):
        huggingface(str(root / "texts"), str(tmp_path), tokenizer=str(evil))
    with refuses(r"folder=None must be a local folder"):
        huggingface_net(folder=None, input_shape=[10], num_classes=3, last_only=True)
    with refuses(r"has 32 tokens, not 31: set data\.num_classes=32"):
        huggingface_net(
            folder=str(root / "llama"), input_shape=[10], num_classes=31, last_only=False
        )


def edited(root, name, folder, tensors=None, **config):
    """A copy of a model's folder with other entries of its config, and other tensors."""
    shutil.copytree(root / name, folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | config))
    if tensors is not None:
        changed = tensors(load_file(folder / "model.safetensors"))
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("theirs", ["eager", "sdpa", "somebody/kernel", "paged|eager", None])
@pytest.mark.parametrize("ours", ["sdpa", "eager"])
def test_our_attention_counts_and_not_the_folders(root, tmp_path, key, theirs, ours):
    """The name of a kernel of the hub would be code."""
    evil = edited(root, "gpt2", tmp_path / "evil", **{key: theirs})
    net = net_of(evil, "", False, attention=ours)
    configs = {id(m.config): m.config for m in net.modules() if hasattr(m, "config")}
    assert {config._attn_implementation for config in configs.values()} == {ours}


def test_a_folder_with_adapters_is_refused(root, tmp_path):
    """peft 0.19 imports a Python file that their config names."""
    evil = edited(root, "gpt2", tmp_path / "evil")
    (evil / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    for last_only in (True, False):
        with refuses(r"folder=.*has adapters, .*merge them"):
            net_of(evil, "", last_only)


def renamed(tensors):
    return {f"x.{name}": t for name, t in tensors.items()}


def halved(tensors):
    return {name: t[: len(t) // 2].clone() for name, t in tensors.items()}


def without_bias(tensors):
    lost = "transformer.h.1.mlp.c_fc.bias"
    assert lost in tensors
    return {name: t for name, t in tensors.items() if name != lost}


@pytest.mark.parametrize("last_only", [True, False])
@pytest.mark.parametrize("change", [renamed, halved, without_bias, lambda tensors: {}])
def test_a_network_starts_at_random_in_its_head_only(root, tmp_path, change, last_only):
    odd = edited(root, "gpt2", tmp_path / "odd", change)
    with refuses(r"^folder=.*(start at random|mismatched_sizes)"):
        net_of(odd, "", last_only)


def test_a_new_head_is_accepted(root, tmp_path):
    """A classifier of a language model has one, and a pooler if the folder lacks it."""

    def without_pooler(tensors):
        return {name: t for name, t in tensors.items() if "pooler" not in name}

    def without_head(tensors):
        return {name: t for name, t in tensors.items() if "lm_head" not in name}

    for name in ("gpt2", "llama"):
        assert net_of(root, name).net.score.weight.isfinite().all()
    net_of(edited(root, "bert", tmp_path / "bert", without_pooler), "")
    headless = edited(root, "llama", tmp_path / "llama", without_head)
    net_of(headless, "")
    with refuses(r"lacks 1 tensors of LlamaForCausalLM.*lm_head"):
        net_of(headless, "", False)
