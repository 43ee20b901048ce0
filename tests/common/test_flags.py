"""Every flag of every trainer: what is no number, beyond sense, empty or without effect is met where flags are read."""

import argparse

import pytest

from common.settings import write_settings
from tests.test_commands import PARSERS

# {script: the flags that it wants}
COMMANDS = {
    "trainer/train_pretrain.py": [],
    "trainer/train_electra.py": [],
    "trainer/train_glue.py": ["--task", "cola", "--data_dir", "glue"],
    "trainer/train_tokenizer.py": ["--data_path", "data.txt", "--out_dir", "out"],
    "scripts/inspect_data.py": ["--data_path", "data.txt"],
}
NOT_A_NUMBER = ("nan", "inf", "-inf", "-2", "1e300", "1" + "0" * 30, "٣x", "9" * 5000)
# The model begins by itself; run.py's, which are ignored.
EMPTY_MEANS_SOMETHING = ("--sample_prompts", "--server_ip", "--server_port")
PRETRAIN, SFT, ELECTRA, GLUE = (f"trainer/train_{name}.py" for name in ("pretrain", "sft", "electra", "glue"))
GENERATE, EVALUATE = "scripts/generate.py", "scripts/evaluate.py"
WANTED = {**COMMANDS, EVALUATE: ["pairs"]}


def refusal(command: str, *flags: str) -> str:
    """The line with which the parser ends; "" where it takes the flags."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        try:
            PARSERS[command]().read([*COMMANDS[command], *flags])
        except SystemExit as stop:
            assert stop.code == 2
            (line,) = lines
            return line
    return ""


def options(command: str) -> list[argparse.Action]:
    """The flags that take a value and leave it to the user which."""
    actions = PARSERS[command]()._actions
    return [action for action in actions if action.option_strings and not action.choices and action.nargs != 0]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_numeric_flag_takes_nan_infinity_a_negative_or_an_absurd_number(command):
    tried = 0
    for action in options(command):
        is_text = action.dest in ("text_suffixes", "split_text", "local_rank", "shard", "save_weight")
        if is_text or action.type in (None, str) or action.nargs == "?":
            continue
        for value in NOT_A_NUMBER:
            line = refusal(command, f"{action.option_strings[0]}={value}")
            assert action.option_strings[0] in line, (action.option_strings[0], value)
            assert len(line) < 400
            tried += 1
    assert tried


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_text_is_what_an_unset_variable_leaves_and_is_refused(command):
    for action in options(command):
        flag = action.option_strings[0]
        if flag in EMPTY_MEANS_SOMETHING:
            assert refusal(command, flag, "") == ""
        else:
            assert flag in refusal(command, flag, ""), flag


@pytest.mark.parametrize(
    "command, typed, meant",
    [
        (PRETRAIN, "--batch-size 8 --budgt 10m \u2014epoch 8", "--batch_size --budget --epochs"),
        # run_clm.py and the Trainer
        (PRETRAIN, "--train_file a --validation_file b --test_file c", "--data_path --val_path"),
        (SFT, "--model_name_or_path a --dataset_name b --output_dir c", "--from_weight --data_path --out_dir"),
        (PRETRAIN, "--bf16 --fp16 1 --warmup_ratio 0.1", "--dtype bfloat16 --dtype float16"),
        (PRETRAIN, "--num_train_epochs 3 --per_device_train_batch_size 3", "--epochs --batch_size"),
        (PRETRAIN, "--logging_steps 1 --save_steps 2 --eval_steps 3", "--log_interval --save_interval --eval_interval"),
        # nanoGPT
        (PRETRAIN, "--block_size=64 --max_iters=8 --init_from gpt2", "--max_seq_len --max_updates --from_weight"),
        (PRETRAIN, "--n_layer 2 --n_head 2 --n_embd 8", "--num_hidden_layers --num_attention_heads --hidden_size"),
        (PRETRAIN, "--lr 1 --min_lr 0 --eval_iters 9 --beta2 0.95", "--learning_rate"),
        # Megatron-LM
        (PRETRAIN, "--global_batch_size 64 --micro-batch-size 4", "--rows_per_update --batch_size"),
        (PRETRAIN, "--valid-data-path a --train-data-path b --clip-grad 1", "--val_path --data_path --grad_clip"),
        # LLaMA-Factory, axolotl
        (SFT, "--cutoff_len 64 --val_size 0.1 --base_model a", "--max_seq_len --val_fraction --from_weight"),
        # Other commands have other flags.
        (PRETRAIN, "--val_data_path a", "--val_path"),
        (ELECTRA, "--max_iters 8 --min_learning_rate 0 --no_deterministic", "--max_steps"),
        (GLUE, "--val_file b --warmup_ratio 0.1", "--dev_file --warmup_share"),
        (GENERATE, "--max_tokens=8 --max_length=9 --system_prompt=a", "--max_new_tokens --system"),
        # Tokens of an update, options of a schedule, a folder of tokenised text, processes that tokenise
        (PRETRAIN, "--total_batch_size 524288 --max_tokens 9 --lr_scheduler_kwargs a --tokenized_path b", ""),
        (PRETRAIN, "--load a --type b --preprocessing_num_workers 8 --val_steps 9", ""),
        (EVALUATE, "--block_size 8 --model a", "--max_length --weight"),
        # The public trainers of ELECTRA: lucidrains' on OpenWebText, then richarddwang's notebook
        (ELECTRA, "--data_n_tensors_per_file 9 --data_vocab_file a --gpu 0", "--data_path --vocab_path --device"),
        (ELECTRA, "--data_max_seq_length 8 --gpu_deterministic --bs 8", "--max_seq_len --deterministic 1 --batch_size"),
        (ELECTRA, "--model_generator a --model_discriminator b", "--generator_config --discriminator_config"),
        (ELECTRA, "--model_mask_prob 0.1 --opt_lr 1 --gpu_mixed_precision", "--mask_share --learning_rate --dtype"),
        (ELECTRA, "--opt_batch_size 8 --opt_warmup_steps 8 --step_log 9", "--batch_size --warmup_steps --log_interval"),
        (ELECTRA, "--opt_num_training_steps 8 --step_ckpt 9 --datas c", "--max_steps --save_steps --data_path"),
        (ELECTRA, "--schedule a --electra_mask_style b --distributed_port 9", "--lr_schedule --mask_style"),
        (ELECTRA, "--gen_smooth_label True --disc_smooth_label True", "--gen_smooth 0.1 --disc_smooth 0.1"),
        (ELECTRA, "--to_fp16 --generator_size_divisor 4 --logger d", "--dtype float16 --generator_divisor --tracker"),
        (SFT, "--lora_rank 8 --dpo_beta 0.1", ""),
        # A value is no flag.
        (PRETRAIN, "--unheard_of data_path -1 epochs=3", ""),
    ],
)
def test_a_flag_of_other_habits_or_with_a_slip_names_the_one_that_is_meant(command, typed, meant, capsys):
    """Reference: the documentation of the programs named."""
    parser = PARSERS[command]()
    with pytest.raises(SystemExit) as stop:
        parser.parse_args([*WANTED.get(command, []), *typed.split()])
    assert stop.value.code == 2
    hint = f"; did you mean {meant}?" if meant else ""
    assert capsys.readouterr().err == f"error: unrecognized arguments: {typed}{hint} (--help lists the flags)\n"


@pytest.mark.parametrize(
    "command, flag, instead",
    [
        ("scripts/export_hf.py", "--push_to_hub", "hf upload NAME FOLDER"),
        ("scripts/export_hf.py", "--hub", "modelscope"),
        ("trainer/train_tokenizer.py", "--cache_dir", "leave it out"),
    ],
)
def test_a_flag_of_earlier_versions_names_what_to_do_instead(command, flag, instead, capsys):
    with pytest.raises(SystemExit):
        PARSERS[command]().parse_args(["--out_dir", "a", flag, "b"])
    assert instead in capsys.readouterr().err.partition(f"unrecognized arguments: {flag} b; ")[2]


def test_a_budget_may_end_in_a_unit():
    for text, value in {"200k": 2e5, "1.5M": 1.5e6, "2B": 2e9, "2g": 2e9, "5e7": 5e7}.items():
        assert PARSERS[PRETRAIN]().read(["--budget_tokens", text]).budget_tokens == value
    assert "invalid quantity value: 'k'" in refusal(PRETRAIN, "--budget_flops", "k")


@pytest.mark.parametrize("command", [PRETRAIN, SFT, ELECTRA, GLUE])
@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_a_launcher_passes_is_taken_and_is_no_setting(command, flag, tmp_path):
    """`python -m torch.distributed.launch` passes one or the other, and sets LOCAL_RANK."""
    settings = PARSERS[command]().read([*WANTED.get(command, []), flag])
    write_settings(settings, tmp_path / "a.yaml")
    assert "rank" not in (tmp_path / "a.yaml").read_text()
