"""The clients that agents are given, and what an agent makes of a copy of one."""

import asyncio
import datetime
import ssl

import openai
import pytest

from etude.agents.gateway.agent import Clients


def certificate(folder):
    """Self-signed, for 127.0.0.1: nobody's word but its own."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    made = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    path = folder / "server.pem"
    plain = serialization.NoEncryption()
    written = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(written + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_a_copy_that_points_at_another_server_checks_its_certificate(tmp_path, kind):
    """An agent may ask a judge with it, and sends that one's key along."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    heard = []

    async def hear(reader, writer):
        heard.append(await reader.read(10))
        writer.close()

    async def main():
        server = await asyncio.start_server(hear, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        clients = Clients.here()
        agents = getattr(clients, kind).copy(base_url="http://127.0.0.1:1/v1", api_key="key")
        judge = agents.with_options(base_url=url, api_key="judge's")
        try:
            if kind == "asynchronous":
                await judge.models.list()
            else:
                await asyncio.to_thread(judge.models.list)
        finally:
            server.close()
            for each in Clients.taken():
                await each.close()

    with pytest.raises(openai.APIConnectionError) as caught:
        asyncio.run(main())
    assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.__cause__)
    assert heard == []
