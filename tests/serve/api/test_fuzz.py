"""Bodies of all sorts: an answer or the right refusal, and a server that lives."""

import http.client
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serve.api.protocol import ChatRequest, CompletionRequest
from tests.serve.api.test_limits import CHAT, COMPLETION, alive

KINDS = {CHAT: ChatRequest, COMPLETION: CompletionRequest}
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2, 0.5, 2**31, 2**63, 10**30, "", "tiny", "user", "text", "\ud7ff", "\x00"])
)  # fmt: skip
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=3))
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={"content": st.text(max_size=20) | values, "tool_calls": values, "name": scalars},
)


@st.composite
def bodies(draw) -> tuple[str, bytes]:
    """A path, and a body that is nearly right, or wrong, or broken."""
    path = draw(st.sampled_from(sorted(KINDS)))
    names = st.sampled_from(sorted([*KINDS[path].model_fields, "response_format", "foo"]))
    fields = draw(st.dictionaries(names, values, max_size=3))
    usual = {"model": "tiny", "prompt": "hi"} if path == COMPLETION else {"model": "tiny"}
    if path == CHAT:
        usual["messages"] = draw(st.lists(messages, min_size=1, max_size=3))
    body = json.dumps({**usual, **fields} if draw(st.booleans()) else fields).encode()
    match draw(st.integers(0, 9)):
        case 0:
            return path, body[: draw(st.integers(0, len(body)))]
        case 1:
            at = draw(st.integers(0, len(body)))
            return path, body[:at] + draw(st.binary(max_size=4)) + body[at:]
        case 2:
            return path, draw(st.binary(max_size=40))
    return path, body


def check(connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body)
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != 200:
        assert reply.status in (400, 404), (body, text)
        error = json.loads(text)["error"]
        assert error["message"] and error.keys() == {"message", "type", "param", "code"}
    elif reply.headers["Content-Type"].startswith("text/event-stream"):
        assert text.endswith(b"data: [DONE]\n\n"), (body, text)
    else:
        assert json.loads(text)["choices"], (body, text)


@pytest.fixture
def connection(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    yield connection
    connection.close()
    assert alive(served)


FIXTURE = [HealthCheck.function_scoped_fixture]


@settings(max_examples=200, suppress_health_check=FIXTURE)
@given(bodies())
@example((CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\\u0000"}]}'))
@example((COMPLETION, b'{"model": "tiny", "prompt": "hi", "stop": "\\u0000", "user": "\\udc00"}'))
@example((COMPLETION, b'{"model": "tiny", "prompt": "hi", "logit_bias": {"01": 1, "1": 2}}'))
def test_any_body_is_answered_or_refused(connection, sent):
    check(connection, *sent)


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=FIXTURE)
@given(bodies())
def test_many_bodies_are_answered_or_refused(connection, sent):
    check(connection, *sent)
