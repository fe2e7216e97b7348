/* One answer of the playground: its text token by token, its reasoning, which tools it calls, how long it took. */

const UNSURE = 0.5; // tokens less probable than this are underlined

class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finishReason = null;
    this.timings = null;
    this.seed = null;
    this.tokens = new WeakMap(); // the element of a piece of text -> its tokens' log-probabilities
    this.text = made("div", { class: "text" });
    this.thought = made("div", { class: "text" });
    this.folded = made("details", { class: "reasoning", hidden: "" }, made("summary", {}, "Reasoning"), this.thought);
    this.tools = made("div");
    this.foot = made("div");
    this.element = made(
      "article",
      { class: "turn assistant" },
      made("h2", {}, "Model"),
      this.folded,
      this.text,
      this.tools,
      this.foot,
    );
    for (const place of [this.text, this.thought]) this.watch(place);
  }

  /* Takes one chunk of the stream. */
  add(chunk) {
    this.seed = chunk.seed ?? this.seed;
    this.timings = chunk.timings ?? this.timings;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    const scores = choice.logprobs?.content ?? [];
    if (reasoning) {
      this.reasoning += reasoning;
      this.folded.hidden = false;
      this.append(this.thought, reasoning, content ? [] : scores);
    }
    if (content) {
      this.content += content;
      this.append(this.text, content, scores);
    }
    for (const call of calls ?? []) this.addCall(call);
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.stopReason = choice.stop_reason ?? this.stopReason;
  }

  append(place, text, scores) {
    if (!scores.length) {
      place.append(text);
      return;
    }
    const isUnsure = scores.some(({ logprob }) => Math.exp(logprob) < UNSURE);
    const piece = made("span", { class: isUnsure ? "token unsure" : "token" }, text);
    this.tokens.set(piece, scores);
    if (!place.hasAttribute("tabindex")) {
      place.setAttribute("tabindex", "0");
      place.setAttribute("role", "group");
      place.setAttribute("aria-label", "Text. Arrow keys tell the probability of each token.");
    }
    place.append(piece);
  }

  addCall({ index, id, function: named }) {
    this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = this.calls[index];
    call.id = id ?? call.id;
    call.function.name += named?.name ?? "";
    call.function.arguments += named?.arguments ?? "";
    this.tools.replaceChildren(
      ...this.calls.map((each) =>
        made(
          "div",
          { class: "call" },
          made("h3", {}, `Calls ${each.function.name}`),
          made("pre", {}, each.function.arguments),
        ),
      ),
    );
  }

  /* The message as it goes back to the model with the next turn. */
  message() {
    return {
      role: "assistant",
      content: this.content || null,
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(this.calls.length && { tool_calls: this.calls }),
    };
  }

  fail(message) {
    this.foot.append(made("p", { class: "failed" }, message));
  }

  end() {
    if (!this.timings) return;
    const { queue_ms, prefill_ms, decode_ms, ttft_ms, itl_ms, itl_p99_ms, ...tokens } = this.timings;
    const rate = decode_ms ? (1000 * (tokens.generated_tokens - 1)) / decode_ms : null;
    const parts = [
      `TTFT ${ms(ttft_ms)} (queue ${ms(queue_ms)}, prefill ${ms(prefill_ms)})`,
      `ITL ${ms(itl_ms)}, p99 ${ms(itl_p99_ms)}`,
      `${many(tokens.generated_tokens, "token")}${rate ? `, ${count(rate)} a second` : ""}`,
      `prompt of ${count(tokens.prompt_tokens)}, ${count(tokens.cached_tokens)} of them cached`,
      `seed ${this.seed}`,
      `ended: ${this.stopReason ?? this.finishReason}`,
    ];
    const bar = made("div", {
      class: "bar",
      role: "img",
      "aria-label": `Queue ${ms(queue_ms)}, prefill ${ms(prefill_ms)}, decode ${ms(decode_ms)}`,
    });
    fill(bar, [
      ["queue", queue_ms],
      ["prefill", prefill_ms],
      ["decode", decode_ms],
    ]);
    this.foot.append(bar, made("ul", { class: "legend timings" }, ...parts.map((part) => made("li", {}, part))));
  }

  /* Probabilities on hover, and by the arrow keys. */

  watch(place) {
    place.addEventListener("pointerover", (event) => this.choose(place, event.target));
    place.addEventListener("pointerleave", () => this.choose(place, null));
    place.addEventListener("blur", () => this.choose(place, null));
    place.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
      if (!step && event.key !== "Escape") return;
      event.preventDefault();
      const current = place.querySelector(".chosen");
      this.choose(place, step ? (current?.[step] ?? (current ? current : place.querySelector(".token"))) : null);
    });
  }

  choose(place, piece) {
    place.querySelector(".chosen")?.classList.remove("chosen");
    const scores = piece && this.tokens.get(piece);
    if (!scores) {
      at("tip").hidden = true;
      return;
    }
    piece.classList.add("chosen");
    showTip(piece, scores);
  }
}

const visible = (token) => JSON.stringify(token).slice(1, -1);

/* Shows under a piece of text how probable its tokens were, and what else was likely. */
function showTip(piece, scores) {
  const lines = scores.flatMap(({ token, logprob, top_logprobs: others }) => [
    [token, logprob, "taken"],
    ...others.filter((other) => other.token !== token).map((other) => [other.token, other.logprob, ""]),
  ]);
  const rows = lines.map(([token, logprob, className]) =>
    made(
      "tr",
      className ? { class: className } : {},
      made("td", {}, visible(token)),
      made("td", {}, percent(Math.exp(logprob))),
    ),
  );
  const tip = at("tip"),
    box = piece.getBoundingClientRect();
  tip.replaceChildren(made("table", {}, made("tbody", {}, ...rows)));
  tip.hidden = false;
  const isBelow = box.bottom + tip.offsetHeight + 8 < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${isBelow ? box.bottom + 6 : Math.max(8, box.top - tip.offsetHeight - 6)}px`;
}
