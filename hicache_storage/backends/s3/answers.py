"""What a response means for a page, and for the store as a whole. Nothing else looks at codes."""

from __future__ import annotations

import email.utils
import enum
import html
import re
import time
from dataclasses import dataclass

from .messages import Request, Response


class Meaning(enum.Enum):
    """What to make of a response."""

    DONE = "done"
    MISSING = "missing"
    FORBIDDEN = "forbidden"
    """403 on a read: what a store says of a missing object to those who may not list."""
    WRONG = "wrong"
    """The object isn't a page of the expected length."""
    STORED = "stored"
    """A conditional write found the object there."""
    UNSUPPORTED = "unsupported"
    """The store doesn't know conditional writes."""
    REFUSED = "refused"
    """The store doesn't take this page."""
    AGAIN = "again"
    """May succeed if it is tried again."""
    SLOWER = "slower"
    """May succeed if it is tried again later, with fewer requests at a time."""
    KEYS = "keys"
    """The credentials aren't valid (any more)."""
    FATAL = "fatal"
    """No request can succeed until someone changes something."""


@dataclass
class Answer:
    """A response and its meaning; `reason` says why it is no success."""

    meaning: Meaning
    response: Response
    reason: str = ""
    code: str = ""


_SLOWER = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "TooManyRequests", "RequestLimitExceeded",
    "Throttling", "ThrottlingException", "RequestThrottled", "ServiceUnavailable", "ServerBusy",
    "BandwidthLimitExceeded", "OperationMaxedOut", "XMinioServerNotInitialized",
}  # fmt: skip
_AGAIN = {"RequestTimeout", "InternalError", "OperationAborted", "ConditionalRequestConflict"}
_KEYS = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_FULL = {
    "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "StorageFull",
    "XMinioAdminBucketQuotaExceeded", "NotEnoughDiskSpace", "InsufficientCapacity",
}  # fmt: skip
_TOO_LARGE = {"EntityTooLarge", "MaxMessageLengthExceeded"}
_BAD_CREDENTIALS = {
    "InvalidAccessKeyId": "the store doesn't know the access key",
    "SignatureDoesNotMatch": "the secret key is wrong (or a proxy changes the request)",
    "InvalidSecurity": "the credentials are not valid",
    "AccountProblem": "the account is suspended",
}
_REGION = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "Redirect",
    "IllegalLocationConstraintException", "IncorrectEndpoint",
}  # fmt: skip


def judge(request: Request, response: Response) -> Answer:
    """The meaning of `response` to `request`."""
    status, body = response.status, response.body
    code = _tag(body, "Code") if b"<Error" in body else ""
    if status in (200, 201, 204, 206) and not code:
        return _success(request, response)
    meaning, reason = _failure(request, response, code)
    detail = _tag(body, "Message") if code else ""
    shown = " ".join(part for part in (str(status), code, detail[:200]) if part)
    return Answer(meaning, response, f"{reason} ({shown})" if reason else shown, code)


def _success(request: Request, response: Response) -> Answer:
    if request.into is None or response.filled:
        return Answer(Meaning.DONE, response)
    found = "of unknown length" if response.length is None else f"of {response.length} bytes"
    return Answer(Meaning.WRONG, response, f"the object is {found}, not a page's")


def _failure(request: Request, response: Response, code: str) -> tuple[Meaning, str]:
    status = response.status
    if code in _SLOWER or status in (429, 503, 509):
        return Meaning.SLOWER, ""
    if code in _AGAIN or status in (408, 409, 425):
        return Meaning.AGAIN, ""
    if code in _KEYS:
        return Meaning.KEYS, "the credentials have expired"
    if code == "RequestTimeTooSkewed":
        return Meaning.FATAL, f"set this machine's clock: {_clock_difference(response)}"
    if code in _BAD_CREDENTIALS:
        return Meaning.FATAL, _BAD_CREDENTIALS[code]
    if code in _FULL or status == 507:
        return Meaning.REFUSED, "the store is full"
    if code in _TOO_LARGE or status == 413:
        return Meaning.REFUSED, "the store takes no object of this size"
    if code == "NoSuchBucket":
        return Meaning.FATAL, "the bucket doesn't exist"
    if code in _REGION or 300 <= status < 400:
        return Meaning.FATAL, _elsewhere(response)
    if any(name == "if-none-match" for name, _ in request.extra):
        if status == 412:
            return Meaning.STORED, ""
        if status == 501 or code == "NotImplemented":
            return Meaning.UNSUPPORTED, "the store knows no conditional writes"
    if status == 416:
        return Meaning.WRONG, "the object is empty"
    if status == 404 or code == "NoSuchKey":
        missing = request.verb in ("GET", "HEAD", "DELETE")
        return (Meaning.MISSING if missing else Meaning.FATAL), ""
    if status == 403 and request.verb in ("GET", "HEAD"):
        return Meaning.FORBIDDEN, ""
    if status in (401, 403):
        return Meaning.FATAL, f"the credentials don't allow {request.verb}"
    if status >= 500 and status != 501:
        return Meaning.AGAIN, ""
    if status < 300:
        return Meaning.AGAIN, "an error inside a success"
    if any(name.startswith("x-amz-checksum") for name, _ in request.extra):
        return Meaning.FATAL, "the store may not know checksums; try checksums=when_required"
    return Meaning.FATAL, ""


def _elsewhere(response: Response) -> str:
    region = response.header("x-amz-bucket-region") or _tag(response.body, "Region")
    place = _tag(response.body, "Endpoint") or response.header("location")
    if region:
        return f"the bucket is in another region; set region={region}"
    if place:
        return f"the store redirects to {place}; set endpoint and region for it"
    return "the store redirects; set endpoint and region to where the bucket is"


def _clock_difference(response: Response) -> str:
    try:
        theirs = email.utils.parsedate_to_datetime(response.header("date")).timestamp()
    except ValueError:
        return "it differs too much from the store's"
    return f"it differs from the store's by {abs(time.time() - theirs):.0f} s"


def _tag(body: bytes, name: str) -> str:
    match = re.search(rb"<%b>([^<]{0,1000})</%b>" % (name.encode(), name.encode()), body)
    return html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
