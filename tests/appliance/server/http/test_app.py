"""Assembly of the application: routes, models, invocations, docs."""

import json
import re
from collections import Counter

import pytest

from appliance.security.keys import parse_keys
from appliance.server.admin import docs
from appliance.server.app import ROUTES, build_app
from appliance.server.process import build_service
from appliance.server.schema.descriptions import DESCRIPTIONS, describe_fields


@pytest.fixture
def gateway(start_gateway, engine):
    """Start a gateway on a port, with a fake engine."""
    return start_gateway(engine)


def operations(app):
    return [
        (method, route.path)
        for _, router in ROUTES
        for route in router.routes
        for method in getattr(route, "methods", ())
    ]


def test_no_route_exists_twice(new_engine, new_config):
    """API-01 no duplicate routes"""
    twice = [operation for operation, count in Counter(operations(None)).items() if count > 1]
    assert twice == []


def test_a_model_without_a_task_does_not_get_its_routes(new_engine, new_config):
    """API-01 routes by task"""
    service = build_service(new_config(new_engine()))
    service.tasks = ()
    paths = build_app(service).openapi()["paths"]
    assert "/invocations" not in paths
    assert "/v1/models" in paths


def test_the_served_names_are_listed_canonical_first(gateway):
    """API-04 model list; the model's card"""
    listed = gateway.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "org/alias"]
    card = listed["data"][0]
    assert (card["object"], card["root"], card["parent"], card["max_model_len"]) == ("model", "tiny", None, 64)
    assert isinstance(card["created"], int)


@pytest.mark.parametrize("path", ["org%2Falias", "org/alias"])
def test_a_model_with_a_slash_is_found_encoded_or_not(gateway, path):
    """H-5 GET /v1/models/{id}"""
    assert gateway.client.get(f"/v1/models/{path}").json()["id"] == "org/alias"


def test_an_unknown_model_is_a_not_found_error(gateway):
    """API-04 unknown model"""
    reply = gateway.client.get("/v1/models/absent")
    assert reply.status_code == 404
    assert reply.json()["error"]["param"] == "model"
    assert "Valid aliases: tiny, org/alias." in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"messages"', b'{"inputs": "x"}', b'{"input": null}', b"null"])
def test_invocations_of_no_known_shape_are_refused(gateway, body):
    """No suitable handler"""
    reply = gateway.client.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "Cannot find suitable handler" in reply.json()["error"]["message"]


def test_invocations_that_are_no_json_are_refused(gateway):
    """Bad JSON"""
    reply = gateway.client.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("JSON decode error: ")


def test_the_description_names_every_route_and_field(gateway):
    described = gateway.client.get("/openapi.json").json()
    assert {"/v1/models", "/health", "/invocations"} <= described["paths"].keys()
    body = described["paths"]["/test/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["max_tokens"]["minimum"] == 1
    assert described == gateway.client.get("/openapi.json").json()


def test_the_page_of_the_api_loads_nothing_from_the_network(gateway):
    page = gateway.client.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    files = re.findall(r'(?:src|href)="(docs/[^"]+)"', page.text)
    assert {f"/{name}" for name in files} == docs.PATHS - {"/docs"}
    assert not re.search(r"https?://|<script(?![^>]* src=)|<style|\son\w+=", page.text)
    for name in files:
        assert gateway.client.get(f"/{name}").status_code == 200
    assert gateway.client.get("/docs/docs.html").status_code == gateway.client.get("/docs/LICENSE").status_code == 404


def test_the_page_of_the_api_needs_no_key_and_the_description_needs_one(start_gateway, engine):
    gateway = start_gateway(engine)
    assert "security" not in gateway.client.get("/openapi.json").json()
    gateway.service.set_keys(parse_keys(["secret"], "keys"))
    assert {gateway.client.get(path).status_code for path in docs.PATHS} == {200}
    assert gateway.client.get("/openapi.json").status_code == 401
    described = gateway.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer" and described["security"]


def test_every_field_of_every_request_body_is_described():
    found = [
        route.openapi_extra for _, router in ROUTES for route in router.routes if getattr(route, "openapi_extra", 0)
    ]
    schemas = {}
    for extra in found:
        (schema,) = (content["schema"] for content in extra["requestBody"]["content"].values())
        schemas |= {schema["title"]: schema} | schema.get("$defs", {})
    assert len(schemas) > 20
    for name, schema in schemas.items():
        described = json.loads(json.dumps(schema))
        describe_fields(name, described)
        bare = [field for field, each in described.get("properties", {}).items() if not each.get("description")]
        assert bare == [], f"{name}: describe these fields in appliance/server/schema/descriptions.py"


def test_every_description_of_a_field_is_used():
    schemas = [
        content["schema"]
        for _, router in ROUTES
        for route in router.routes
        if (extra := getattr(route, "openapi_extra", None))
        for content in extra["requestBody"]["content"].values()
    ]
    fields = {(s["title"], field) for s in schemas for field in s["properties"]}
    fields |= {(n, field) for s in schemas for n, d in s.get("$defs", {}).items() for field in d.get("properties", {})}
    names = fields | {field for _, field in fields}
    assert [name for name in DESCRIPTIONS if name not in names] == []


def test_references_in_the_description_resolve(gateway):
    """/openapi.json is whole"""
    described = gateway.client.get("/openapi.json").json()
    seen = []

    def walk(value):
        if isinstance(value, dict):
            if "$ref" in value and isinstance(value["$ref"], str):
                seen.append(value["$ref"])
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(described["paths"])
    walk(described["components"])
    for reference in seen:
        target = described
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def test_docs_can_be_switched_off(start_gateway, engine):
    """docs absent by configuration"""
    gateway = start_gateway(engine, **{"endpoints.docs": False})
    assert {gateway.client.get(path).status_code for path in docs.PATHS} == {404}
    assert gateway.client.get("/openapi.json").status_code == 404
