// Starts Swagger UI on this service's description. The key is the one of the playground: kept in the tab, sent as a header.
"use strict";

const KEY = "slipway.key";

function authorized(request) {
  const key = sessionStorage.getItem(KEY);
  if (key && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key}`;
  return request;
}

function askKey(message) {
  const form = document.createElement("form");
  const label = document.createElement("label"), input = document.createElement("input");
  const text = document.createElement("p"), button = document.createElement("button");
  form.className = "key";
  text.textContent = message;
  label.textContent = "API key";
  input.type = "password";
  input.autocomplete = "off";
  button.textContent = "Show the API";
  label.append(input);
  form.append(text, label, button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    start();
  });
  document.getElementById("docs").replaceChildren(form);
  input.focus();
}

async function start() {
  const request = authorized({ headers: {} });
  const reply = await fetch("openapi.json", { headers: request.headers, cache: "no-store" });
  if (reply.status === 401) {
    askKey(sessionStorage.getItem(KEY) ? "This key is not valid." : "This service requires an API key.");
    return;
  }
  const spec = await reply.json();
  spec.servers = [{ url: new URL(".", document.baseURI).pathname.replace(/\/$/, "") || "/" }];
  SwaggerUIBundle({
    spec,
    dom_id: "#docs",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    tryItOutEnabled: true,
    requestInterceptor: authorized,
    validatorUrl: null,
  });
}

start();
