"""LangChain's OpenAI integration: invoke, stream, structured output, tools, embeddings."""

import os

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

server = {"base_url": f"{os.environ['TWOSTEP_URL']}/v1", "api_key": "none", "model": os.environ["TWOSTEP_MODEL"]}
question = "Say something about lists."


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


chat = ChatOpenAI(**server, max_tokens=12, seed=1, temperature=1)
assert chat.invoke(question).content == "".join(chunk.content for chunk in chat.stream(question))
assert chat.invoke(question).usage_metadata["output_tokens"] <= 12

patient = ChatOpenAI(**server, max_tokens=300, seed=1)
for method in ("json_schema", "function_calling"):
    answer = patient.with_structured_output(City, method=method, include_raw=True).invoke(question)
    cut = answer["raw"].response_metadata["finish_reason"] == "length"
    assert cut or isinstance(answer["parsed"], City), answer
called = patient.bind_tools([City], tool_choice="any").invoke(question)
assert called.tool_calls[0]["name"] == "City"

assert OpenAI(**server, max_tokens=6, seed=1).invoke("A list is")
embeddings = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
assert len(embeddings.embed_documents(["a list", "a dictionary"])) == 2
