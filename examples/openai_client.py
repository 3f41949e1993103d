"""The official OpenAI client against `baton up models/baton-demo-llama` on its default port."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the for statement?"}],
    max_tokens=64,
    temperature=0.0,
    stream=True,
)
for event in stream:
    print(event.choices[0].delta.content or "", end="", flush=True)
print()
