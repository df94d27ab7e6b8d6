"""instructor: a typed object out of each of its modes that this API has."""

import instructor
import openai
import pytest
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(instructor.Mode.TOOLS, marks=pytest.mark.shows("instructor", "tools")),
        pytest.param(instructor.Mode.JSON_SCHEMA, marks=pytest.mark.shows("instructor", "structured output")),
    ],
)
def test_a_typed_object_comes_back(url, key, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=mode)
    found = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "JSON please: name is Ann, age is 30"}],
        response_model=Person,
        temperature=0,
        max_tokens=300,
        max_retries=0,
    )
    assert isinstance(found, Person)


@pytest.mark.shows("instructor", "streaming")
def test_a_partial_object_grows(url, key):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model="demo",
            messages=[{"role": "user", "content": "JSON please: name is Ann, age is 30"}],
            response_model=Person,
            temperature=0,
            max_tokens=300,
        )
    )
    assert parts and parts[-1].name is not None
