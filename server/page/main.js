/* Which view is shown, what the server is, and the clock of the page. */

const PERIOD_MS = 1000;
let isIntroduced = false;

function showView() {
  const shown = location.hash === "#playground" ? "playground" : "live";
  for (const name of ["live", "playground"]) {
    at(`view-${name}`).hidden = name !== shown;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function introduce() {
  const [models, info] = await Promise.all([get("v1/models"), get("server_info")]);
  const { engine } = info;
  at("name").textContent = document.title = models.data[0].id;
  at("facts").textContent = [
    `twostep ${info.version}`,
    engine.architecture,
    `${engine.device}, ${engine.dtype}`,
    `${engine.linear} kernels`,
    `context of ${count(engine.max_model_len)} tokens`,
    `KV cache of ${count(engine.num_blocks * engine.block_size)}`,
  ].join(" · ");
  at("model").replaceChildren(...models.data.map(({ id }) => made("option", {}, id)));
  isIntroduced = true;
}

async function tick() {
  try {
    if (!isIntroduced) await introduce();
    if (!at("view-live").hidden) await look();
    tell("server", "");
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    tell("server", error.message);
  }
}

async function run() {
  for (;;) {
    if (!document.hidden)
      await tick().catch((error) =>
        tell("bug", `This page has a bug: ${error.message}. Reload it, and please report this.`),
      );
    await new Promise((done) => {
      setTimeout(done, PERIOD_MS);
      window.addEventListener("key", done, { once: true });
    });
  }
}

window.addEventListener("hashchange", showView);
showView();
run();
