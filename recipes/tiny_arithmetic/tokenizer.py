"""One token a character, with the chat template that verl asks for."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

# verl's agent loop asks a Qwen tokenizer for <|im_end|> and for a newline of one token.
END, USER, ASSISTANT, UNKNOWN = "<|im_end|>", "<|user|>", "<|assistant|>", "?"
CHARACTERS = "0123456789+=# \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Ids: end 0, user 1, assistant 2, unknown 3, then CHARACTERS. Any other character is unknown."""
    vocabulary = {token: index for index, token in enumerate([END, USER, ASSISTANT, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
