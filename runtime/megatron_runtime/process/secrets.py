"""Validates values that may be secrets before they are used. The values are from environment variables and files.

Libraries quote an invalid value in their errors and warnings. These errors reach logs and, through termination
messages, the status of a custom resource. The messages of this module name the variable or file and never contain its
value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

VISIBLE: Final = r"[!-~]([ -~]*[!-~])?"
"""Visible ASCII with inner spaces, which are the characters that an HTTP header can have."""


class SecretError(ValueError):
    """A value does not have the expected form.

    The message has the value's name and the remedy, but not the value.
    """


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value that may be secret.

    pattern: regular expression for the whole value.
    want:    description of the form, which the error message puts after "give".
    """

    pattern: str
    want: str

    def check(self, name: str, value: str) -> str:
        """Return `value` if it has this form. Otherwise raise SecretError.

        name: name of the value in the error message.
        """
        if re.fullmatch(self.pattern, value) is None:
            raise SecretError(f"{name} does not have a valid value: give {self.want}")
        return value


HEADER = Form(VISIBLE, "visible ASCII characters without line breaks, as the provider wrote them")
URL = Form(
    r"https?://[A-Za-z0-9._~\[\]:-]+(/[!-?A-~]*)?", "https://HOST[:PORT][/PATH] without a user name and password"
)
SWITCH = Form(r"(?i:1|0|true|false|yes|no|on|off|y|n|t|f)", "true or false")
NUMBER = Form(r"[0-9]{1,12}(\.[0-9]{1,6})?", "a number")
INTEGER = Form(r"-?[0-9]{1,18}", "a whole number")


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the integer in the environment variable `name`, or `default` if the variable is not set.

    Raises SecretError if the value is not an integer.
    """
    return int(INTEGER.check(f"the environment variable {name}", environment.get(name, str(default)).strip()))
