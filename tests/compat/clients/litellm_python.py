"""LiteLLM, as a user of an OpenAI-compatible server: chat, streamed chat, text, embeddings, errors."""

import os

import litellm

server = {"api_base": f"{os.environ['TWOSTEP_URL']}/v1", "api_key": "none"}
model = os.environ["TWOSTEP_MODEL"]
messages = [{"role": "user", "content": "Say something about lists."}]

asked = {"model": f"openai/{model}", "messages": messages, "max_tokens": 12, "seed": 1, **server}
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
assert whole.usage.completion_tokens <= 12

text = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="A list is", max_tokens=6, seed=1, **server
)
assert text.choices[0].text

vectors = litellm.embedding(model=f"openai/{model}", input=["a list", "a dictionary"], **server)
assert len(vectors.data) == 2

try:
    litellm.completion(**{**asked, "model": "openai/nobody"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was not refused")
