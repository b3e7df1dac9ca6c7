// Reads a pack with h5wasm and prints what it found as one line of JSON.
//
//   node read_pack.mjs FILE
//
// "images_sha256" is of the pixels in C order; all other values are plain.
// A file without one of the datasets gives null for it.

import { createHash } from "node:crypto";
import h5wasm from "h5wasm/node";

await h5wasm.ready;

const file = new h5wasm.File(process.argv[2], "r");
const names = new Set(file.keys());

function numbers(values) {
  return Array.from(values, Number);
}

function attribute(item, name) {
  return name in item.attrs ? item.attrs[name].value : null;
}

const images = file.get("images");
const labels = names.has("labels") ? file.get("labels") : null;
const pixels = images.value;

const found = {
  format: Number(attribute(file, "h5pack_format")),
  complete: Number(attribute(file, "h5pack_complete")),
  options: attribute(file, "h5pack_options"),
  images_shape: images.shape,
  images_dtype: images.dtype,
  images_class: attribute(images, "CLASS"),
  images_layout: attribute(images, "h5pack_layout"),
  images_sha256: createHash("sha256").update(pixels).digest("hex"),
  labels_shape: labels === null ? null : labels.shape,
  labels: labels === null ? null : numbers(labels.value),
  classes: labels === null ? null : attribute(labels, "classes"),
  columns: labels === null ? null : attribute(labels, "columns"),
  filenames: names.has("filenames") ? file.get("filenames").value : null,
  split_names: names.has("splits") ? file.get("splits/name").value : null,
  split_rows: names.has("splits") ? numbers(file.get("splits/rows").value) : null,
  checksums: names.has("checksums") ? numbers(file.get("checksums/images").value) : null,
  mean: names.has("statistics") ? numbers(file.get("statistics/mean").value) : null,
};
file.close();

console.log(JSON.stringify(found));
