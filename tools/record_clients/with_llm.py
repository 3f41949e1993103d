"""`llm`: text and a stream, a schema, and a chain of tools, by its Python API with a model from its configuration."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

QUESTION = "What is the weather in Bern? Answer in JSON with city and degrees."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "degrees": {"type": "integer", "minimum": -40, "maximum": 50}},
    "required": ["city", "degrees"],
}


def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Look up the weather of a city."""
    return json.dumps({"city": city, "degrees": 21})


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "demo", "model_name": "demo", "api_base": url, "supports_schema": True}
        # JSON is valid YAML.
        configured = json.dumps([{**entry, "supports_tools": True}])
        (Path(folder) / "extra-openai-models.yaml").write_text(configured)
        os.environ["LLM_USER_PATH"] = folder
        os.environ["OPENAI_API_KEY"] = "none"
        import llm

        model = llm.get_model("demo")
        more = {"temperature": 0, "max_tokens": 80}
        short = {"temperature": 0, "max_tokens": 16}
        print("text:", repr(model.prompt(QUESTION, stream=False, **short).text()))
        print("stream:", repr("".join(model.prompt(QUESTION, **short))))
        found = json.loads(model.prompt(QUESTION, schema=SCHEMA, stream=False, **more).text())
        assert isinstance(found["degrees"], int)
        print("schema:", found)
        conversation = model.conversation(tools=[get_weather])
        print("chain:", repr(conversation.chain(QUESTION, options=more).text()))
        print("again:", repr(conversation.prompt("And in Oslo?", stream=False, **short).text()))


main(sys.argv[1])
