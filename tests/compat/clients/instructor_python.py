"""Instructor over OpenAI's client: models out of tools and out of a JSON schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{os.environ['TWOSTEP_URL']}/v1", api_key="none")


class City(BaseModel):
    """Short enough for any model to end."""

    name: Literal["Bern", "Rome"]
    hills: int = Field(ge=1, le=9)


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
