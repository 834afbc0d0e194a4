"""`ObjectStorage` keeps the contract of a `Storage`, and its errors name what failed."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from s3_server import KEY, SECRET, s3_client

from accelerate_checkpoint import LocalStorage
from accelerate_checkpoint.transfer import persist
from accelerate_core.errors import CheckpointError
from accelerate_object_store import ObjectStorage, ObjectStoreSettings
from accelerate_testing import StorageSuite

MIB = 1 << 20


class TestMemory(StorageSuite):
    """Memory, which other processes cannot see."""

    storage = "s3_server:storage"
    place = "memory://suite/{name}"
    one_process = True


class TestLocal(StorageSuite):
    """Local paths, which are kept as the checkpointer `directory` keeps them."""

    storage = "s3_server:storage"
    place = "{path}"


@pytest.mark.usefixtures("s3")
class TestS3(StorageSuite):
    """S3, emulated by moto's server."""

    storage = "s3_server:storage"
    place = "s3://tests/suite/{name}"


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("step_1", "memory://bucket/run/step_1"),
        ("memory://other/step_1", "memory://other/step_1"),
        ("/tmp/step_1", str(Path("/tmp").resolve() / "step_1")),
        ("file:///tmp/step_1", str(Path("/tmp").resolve() / "step_1")),
        ("gs://bucket/step_1", "gs://bucket/step_1"),
    ],
)
def test_relative_targets_are_below_the_url_and_others_stay_where_they_are(
    target: str, place: str
) -> None:
    settings = ObjectStoreSettings(options={"skip_signature": "true"})
    assert ObjectStorage("memory://bucket/run", settings).locate(target) == place


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("hf://x/y", r"no store for hf://. It has s3://, s3a://, gs://, az://"),
        ("az://container/run", r"Account must be specified Set options .* AZURE_"),
    ],
)
def test_url_that_cannot_be_opened_is_an_error_that_says_what_is_allowed(
    url: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(CheckpointError, match=error):
        ObjectStorage().locate(url)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://container/run", {"account_name": "name", "account_key": "a2V5"}),
        ("abfs://container@name.dfs.core.windows.net/run", {"account_key": "a2V5"}),
        ("gs://bucket/run", {"skip_signature": "true"}),
    ],
)
def test_google_and_azure_open_with_their_options(url: str, options: dict[str, str]) -> None:
    """Only opened: no server for them runs in the tests."""
    assert ObjectStorage(None, ObjectStoreSettings(options=options)).locate(url) == url


def test_unknown_option_is_an_error_with_its_name_and_without_its_value(
    s3: object,
) -> None:
    settings = ObjectStoreSettings(options={"secret_acces_key": "hunter2hunter2"})
    with pytest.raises(
        CheckpointError, match=r"'secret_acces_key' is not valid for store 'S3'"
    ) as e:
        ObjectStorage(None, settings).locate("s3://tests/x")
    assert "hunter2" not in str(e.value)


@pytest.mark.usefixtures("s3")
def test_missing_bucket_is_named_and_not_tried_again() -> None:
    store = ObjectStorage()
    with pytest.raises(CheckpointError, match="s3://missing does not exist") as failure:
        store.publish("s3://missing/run", "save-0", b"")
    assert not store.is_transient(failure.value)


def test_refused_connection_is_tried_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = ObjectStorage(None, ObjectStoreSettings(attempts=2))
    with pytest.raises(CheckpointError, match=r"s3://tests/run/x: .* after 1 retries") as failure:
        store.read("s3://tests/run", "x")
    assert store.is_transient(failure.value)
    assert failure.value.__cause__ is None
    assert KEY not in str(failure.value)


@pytest.mark.usefixtures("s3")
def test_large_file_is_uploaded_in_parts_and_a_failed_upload_leaves_none(tmp_path: Path) -> None:
    store = ObjectStorage(None, ObjectStoreSettings(part_size=5 * MIB))
    source = tmp_path / "large"
    source.write_bytes(bytes(range(256)) * (12 * MIB // 256))
    sent: list[int] = []
    store.write("s3://tests/large", "save-0/model", source, sent.append)
    client = s3_client()
    head = client.head_object(Bucket="tests", Key="large/save-0/model", PartNumber=1)
    assert head["ContentLength"] <= 6 * MIB
    assert sum(sent) == 12 * MIB
    assert len(sent) == 3
    assert store.read("s3://tests/large", "save-0/model") == source.read_bytes()

    def fail(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write("s3://tests/large", "save-0/failed", source, fail)
    assert "save-0/failed" not in store.list("s3://tests/large", "save-0")
    uploads = client.list_multipart_uploads(Bucket="tests").get("Uploads", [])
    assert [one["Key"] for one in uploads if one["Key"].startswith("large/")] == []


def test_profile_without_boto3_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(
        CheckpointError, match=r'pip install "accelerate-object-store\[aws-profiles\]"'
    ):
        ObjectStorage().locate("s3://tests/x")


def test_local_storage_names_the_plugin_for_urls(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"s3://bucket/run is a URL.*object_store"):
        LocalStorage().locate("s3://bucket/run", saving=True)


@pytest.mark.parametrize(("failures", "answers"), [(0, 1), (2, 3), (9, 3)])
def test_only_one_layer_repeats_a_request_that_fails(
    monkeypatch: pytest.MonkeyPatch, failures: int, answers: int
) -> None:
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            failed = len(requests) <= failures
            self.send_response(503 if failed else 200)
            body = b"" if failed else b"content"
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    store = ObjectStorage(None, ObjectStoreSettings(attempts=3))

    def read() -> bytes:
        return persist(store, "x cannot be read", lambda: store.read("s3://tests/run", "x"))

    try:
        if failures < answers:
            assert read() == b"content"
        else:
            with pytest.raises(CheckpointError, match="x cannot be read: StoreError"):
                read()
    finally:
        server.shutdown()
        server.server_close()
    assert len(requests) == answers


@pytest.mark.parametrize("secret", ["s3cret", "se/cr+et"])
def test_credentials_in_a_url_are_in_no_error(secret: str) -> None:
    address = f"s3://{KEY}:{secret}@tests/run"
    store = ObjectStorage(None, ObjectStoreSettings(attempts=1))
    with pytest.raises(CheckpointError, match=r"@tests/run contains credentials") as failure:
        store.locate(address)
    assert secret not in str(failure.value)
    with pytest.raises(CheckpointError) as failure:
        LocalStorage().locate(address)
    assert secret not in str(failure.value)
