/* JSON schemas as people read them. What one refers to is shown when it is opened, so it may contain itself. */

class Schemas {
  constructor(components) {
    this.components = components;
  }

  /* What a schema stands for, with its name if it has one. */
  resolve(schema) {
    if (!schema.$ref) return { name: schema.title, ...schema };
    const name = schema.$ref.split("/").at(-1);
    return { name, ...this.components[name], description: schema.description ?? this.components[name].description };
  }

  /* A type in words, as "number from 0 to 2, or null". */
  words(schema) {
    if (schema.$ref)
      return this.components[schema.$ref.split("/").at(-1)].enum
        ? this.words(this.resolve(schema))
        : schema.$ref.split("/").at(-1);
    const choices = schema.anyOf ?? schema.oneOf;
    if (choices) return [...new Set(choices.map((each) => this.words(each)))].join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
    if (schema.type === "array")
      return `array of ${schema.items && Object.keys(schema.items).length ? this.words(schema.items) : "anything"}`;
    return `${schema.type ?? "anything"}${bounds(schema)}`;
  }

  /* The objects that a schema names, itself or in its choices and items. */
  objects(schema) {
    const inner = [...(schema.anyOf ?? schema.oneOf ?? []), ...(schema.items ? [schema.items] : [])];
    if (inner.length) return inner.flatMap((each) => this.objects(each));
    const found = this.resolve(schema);
    return found.properties
      ? [found]
      : schema.$ref && (found.anyOf ?? found.oneOf ?? found.items)
        ? this.objects(found)
        : [];
  }

  /* The fields of an object, each with the objects that it may hold. */
  fields(object) {
    const required = new Set(object.required ?? []);
    return made(
      "dl",
      { class: "fields" },
      ...Object.entries(object.properties).flatMap(([name, field]) => [
        made(
          "dt",
          {},
          made("code", {}, name),
          made("span", { class: "type" }, this.words(field)),
          ...(required.has(name) ? [made("span", { class: "needed" }, "required")] : []),
        ),
        made(
          "dd",
          {},
          ...(field.description ? [prose(field.description)] : []),
          ...(isSaid(field.default)
            ? [made("p", { class: "soft" }, `By default ${JSON.stringify(field.default)}.`)]
            : []),
          ...this.objects(field).map((each) => this.folded(each)),
        ),
      ]),
    );
  }

  folded(object) {
    const details = made("details", {}, made("summary", {}, object.name ?? "object"));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      details.append(...(object.description ? [prose(object.description)] : []), this.fields(object));
    });
    return details;
  }

  /* The smallest value of a schema that has all that is required. */
  example(schema, depth = 0) {
    const found = this.resolve(schema);
    if ("const" in found) return found.const;
    if (found.enum) return found.enum[0];
    const choices = found.anyOf ?? found.oneOf;
    if (choices) return this.example(choices[0], depth);
    if (found.properties)
      return depth > 4
        ? {}
        : Object.fromEntries(
            (found.required ?? []).map((name) => [name, this.example(found.properties[name], depth + 1)]),
          );
    if (found.type === "array") return depth > 4 || !found.items ? [] : [this.example(found.items, depth + 1)];
    return (
      { string: "", integer: found.minimum ?? 1, number: found.minimum ?? 1, boolean: true, null: null }[found.type] ??
      {}
    );
  }
}

const isSaid = (value) => value !== undefined && value !== null;

function bounds({ minimum, maximum, exclusiveMinimum }) {
  const parts = [
    isSaid(minimum) ? ` from ${minimum}` : isSaid(exclusiveMinimum) ? ` above ${exclusiveMinimum}` : "",
    isSaid(maximum) ? ` to ${maximum}` : "",
  ];
  return parts.join("");
}

/* A description, paragraph by paragraph. */
function prose(text) {
  return made(
    "div",
    { class: "prose" },
    ...text.split(/\n\s*\n/).map((paragraph) => made("p", {}, ...marked(paragraph))),
  );
}
