"""A model small enough to be calibrated in seconds: two random layers that read single characters."""

from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from calibrate.recipe import Recipe
from support.models import save

CHARACTERS = [chr(code) for code in (10, *range(32, 127))]  # with three special tokens they fit a vocabulary of 128
QUICK = {
    "segments": (64, 128),
    "lookbacks": (64,),  # prompts are short: with more most of their keys are always visited
    "num_prompts": 2,
    "num_held_out": 1,
    "num_certify": 0,
    "trials": 3,
}
QUICKEST = QUICK | {"num_prompts": 1, "lengths": (256,), "segments": (64,), "lookbacks": (64,), "trials": 1}


def save_tiny(folder, change=lambda model: None):
    """A model and its tokenizer, as `calibrate.model.models.load` finds them."""
    save("llama", folder, change)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer():
    """A tokenizer that reads single characters, with a vocabulary of less than 128."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<pad>"))  # what is not merged is one character
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def recipe(folder, out, **changes):
    options = {"model": str(folder), "lengths": (512, 1024), "out": out} | QUICK | changes
    return Recipe.from_options(options if "budget_mse" in options else {"budget_rel_mse": 1e-2} | options)
