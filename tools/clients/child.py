"""The structured answer that the clients' tests request."""

from typing import Literal

from pydantic import BaseModel, Field


class Child(BaseModel):
    """A child of a story."""

    name: Literal["Lily", "Tom"]
    age: int = Field(ge=1, le=9)
    toys: list[Literal["ball", "doll"]] = Field(max_length=2)
