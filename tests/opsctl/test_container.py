"""What docker and podman tell of a container, in the shapes of their own references: the parts that a rollout reads."""

from __future__ import annotations

import json

import pytest

from opsctl.service import container
from opsctl.service.manager import ServiceError

DOCKER = {
    "Id": "aa86eacfb3b3ed4cd362c1e88fc89a53908ad05fb3a4103bca3f9b28292d14bf", "Path": "lastbatch", "Args": ["serve", "--port", "30000"],
    "State": {"Status": "running", "Running": True, "Restarting": False, "Pid": 1234, "ExitCode": 0, "StartedAt": "2020-01-06T09:06:59Z"},
    "Image": "sha256:72297848456d5d37d1262630108ab308d3e9ec7ed1c3286a32fe09856619a782", "Name": "/flash", "RestartCount": 2,
    "Config": {"Image": "registry/lb:1.2", "Entrypoint": ["lastbatch"], "Cmd": ["serve", "--port", "30000"]},
}  # fmt: skip
PODMAN = {
    "Id": "4fa6e0f0c6786287e131c3852c58a2e01cc697a68231826813597e4994f1d6e2", "Path": "lastbatch", "Args": ["serve"],
    "State": {"OciVersion": "1.0.2", "Status": "running", "Running": True, "Pid": 77, "ConmonPid": 75},
    "Image": "72297848456d5d37d1262630108ab308d3e9ec7ed1c3286a32fe09856619a782", "ImageName": "localhost/lb:latest", "Name": "flash",
    "Config": {"Cmd": ["serve"], "Entrypoint": "lastbatch"},
}  # fmt: skip
RUN = ("podman", "run", "--rm", "--name", "lb-flash", "lb", "serve")


def test_both_are_read() -> None:
    found = container.parse(json.dumps([DOCKER]), "flash")
    assert (found.image, found.command, found.pid, found.restarts) == ("registry/lb:1.2", ("serve", "--port", "30000"), 1234, 2)
    found = container.parse(json.dumps([PODMAN]), "flash")
    assert (found.image, found.command, found.pid, found.restarts) == ("localhost/lb:latest", ("serve",), 77, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"Id": "x"}]', '[{"Id": "x", "Config": null, "State": {}}]'])
def test_another_shape_is_an_error_that_names_the_container(text: str) -> None:
    with pytest.raises(ServiceError, match="container flash"):
        container.parse(text, "flash")


def test_an_image_is_found_in_the_command_under_its_short_name_too() -> None:
    assert container.image_at(RUN, "localhost/lb:latest") == 5
    assert container.image_at(("docker", "run", "registry/lb:1.2"), "registry/lb:1.2") == 2
    for argv, image in ((RUN, "localhost/other:latest"), (("docker", "run", "a", "a"), "a"), (RUN, "localhost/lb:1.2")):
        with pytest.raises(ServiceError, match="not once"):
            container.image_at(argv, image)
