"""Conversations for tests: files of small ones, and a plain reading of the chat template to compare with."""

import json
import random

from tests.helpers import flags, trainer_of, write_records

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "hills"]


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


def write_chats(path, n=40, seed=0, most_words=12):
    """A jsonl file of conversations of one or two questions and answers; returns its path."""
    generator = random.Random(seed)

    def words():
        return " ".join(generator.choices(WORDS, k=generator.randint(1, most_words)))

    conversations = [[] for _ in range(n)]
    for number, turns in enumerate(conversations):
        for _ in range(generator.randint(1, 2)):
            turns += [turn("user", f"{number} {words()}?"), turn("assistant", words())]
    write_records(path, [{"conversations": turns} for turns in conversations])
    return path


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def pieces(conversation):
    """[(text, it is a special token, it is trained)]: what docs/sft.md says of the template, turn by turn."""
    messages, tools = conversation["messages"], conversation.get("tools")
    found = []

    def say(*texts, special=False, trained=False):
        found.extend((text, special, trained) for text in texts)

    def special(text, trained=False):
        say(text, special=True, trained=trained)

    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if system or tools:
        special("<|im_start|>")
        say("system\n", system)
        if tools:
            say("\n\n" if system else "", "Functions that you may call, a JSON schema each:")
            say(*("\n" + as_json(tool) for tool in tools))
            say('\nA call is a JSON object with "name" and "arguments" between ')
            special("<tool_call>")
            say(" and ")
            special("</tool_call>")
            say(".")
        special("<|im_end|>")
        say("\n")
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system" and number == 0:
            continue
        special("<|im_start|>")
        say(role + "\n")
        if role == "tool":
            special("<tool_response>")
            say("\n", content, "\n")
            special("</tool_response>")
        elif role == "assistant":
            answer(message, content, found)
        else:
            say(content)
        special("<|im_end|>", trained=role == "assistant" and is_learned(message))
        say("\n")
    return found


def is_learned(message):
    """True if an answer is trained: it is not empty, and has no weight of 0."""
    says = [message["content"].strip(), message.get("reasoning_content", "").strip(), message.get("tool_calls")]
    return any(says) and message.get("weight") != 0


def answer(message, content, found):
    """Add what the assistant has written, but for the token that ends its turn."""
    learned = is_learned(message)
    # The text is cut where an answer begins, be it trained or not.
    found.append((None, False, learned))
    thoughts = message.get("reasoning_content")
    if thoughts:
        found += [("<think>", True, learned), (f"\n{thoughts}\n", False, learned), ("</think>", True, learned)]
        found.append(("\n\n", False, learned))
    found.append((content, False, learned))
    for number, call in enumerate(message.get("tool_calls", [])):
        found.append(("\n" if content or number else "", False, learned))
        arguments = call["arguments"] if isinstance(call["arguments"], str) else as_json(call["arguments"])
        text = f'\n{{"name": {as_json(call["name"])}, "arguments": {arguments}}}\n'
        found += [("<tool_call>", True, learned), (text, False, learned), ("</tool_call>", True, learned)]


def ids_and_mask(tokenizer, conversation):
    """(ids, whether each is trained) of a conversation. What stands beside each other and is trained alike is one text."""
    ids, mask = [], []
    text, text_is_trained = "", False

    def flush():
        nonlocal text
        new = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids if text else []
        ids.extend(new)
        mask.extend([text_is_trained] * len(new))
        text = ""

    for piece, is_special, is_trained in pieces(conversation):
        if piece is None or is_special or is_trained != text_is_trained:
            flush()
        if piece is None:
            continue
        if is_special:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
            mask.append(is_trained)
        else:
            text_is_trained = is_trained
            text += piece
    flush()
    return ids, mask


def train(**changes):
    """Call train_sft.py's main in this process, from fresh weights unless `from_weight` is given; returns its Trainer."""
    from trainer import train_sft

    return trainer_of(train_sft.main, flags(**{"from_weight": "none", "max_seq_len": 64, **changes}))
