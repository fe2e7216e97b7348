"""Instructor over OpenAI's client: models out of tools and out of a JSON schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{os.environ['TWOSTEP_URL']}/v1", api_key="none")


class City(BaseModel):
    name: str
    inhabitants: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    asking = instructor.from_openai(client, mode=mode)
    city = asking.chat.completions.create(
        model=os.environ["TWOSTEP_MODEL"],
        messages=[{"role": "user", "content": "Tell me of a city."}],
        response_model=City,
        max_tokens=400,
        max_retries=4,
        seed=1,
    )
    assert isinstance(city, City), city
