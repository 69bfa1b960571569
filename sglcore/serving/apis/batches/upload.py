"""A form with a file, as browsers and OpenAI's clients send it (RFC 7578)."""

from __future__ import annotations

from email import policy
from email.parser import BytesParser

from sglcore.serving.replicas.errors import InvalidRequest


def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], tuple[str, bytes]]:
    """The fields of a form, and the name and the content of its file. Raises InvalidRequest."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidRequest("the body is no form", wanted="multipart/form-data", status=415, param="file")
    head = f"content-type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    fields: dict[str, str] = {}
    file: tuple[str, bytes] | None = None
    for part in BytesParser(policy=policy.HTTP).parsebytes(head + body).iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            continue
        if name == "file" and file is None:
            file = (part.get_filename() or "file", content)
        else:
            fields[name] = content.decode("utf-8", "replace")
    if file is None:
        raise InvalidRequest("the form has no file", wanted="a part named file", param="file")
    return fields, file
