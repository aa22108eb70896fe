// SPDX-License-Identifier: Apache-2.0

#include "formats/rank/rank_text.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string Quoted(std::string_view text) {
  using nlohmann::json;
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

// `value`, right-aligned in the width of `greatest`.
std::string Padded(uint64_t value, uint64_t greatest) {
  const std::string digits = std::to_string(value);
  const size_t width = std::to_string(greatest).size();
  return std::string(width > digits.size() ? width - digits.size() : 0, ' ') + digits;
}

std::string List(const std::vector<uint64_t>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += StrCat(i == 0 ? "" : ",", values[i]);
  return out + "]";
}

// Where a piece begins in the local tensor, as an index of it.
std::vector<uint64_t> IndexOf(const Piece& piece, const Shape& local) {
  std::vector<uint64_t> index(local.size(), 0);
  uint64_t rest = piece.local_offset;
  for (size_t d = local.size(); d-- > 0;) {
    if (local[d] == 0) continue;
    index[d] = rest % local[d];
    rest /= local[d];
  }
  return index;
}

std::string PieceText(const Piece& piece, const Shape& local) {
  std::string box;
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    box += StrCat(d == 0 ? "" : ",",
                  List({piece.atom_begin[d], piece.atom_begin[d] + piece.shape[d]}));
  }
  std::string out = StrCat("{\"box\":[", box, "],\"at\":", List(IndexOf(piece, local)));
  if (piece.scale != 1.0) {
    out += fmt::format(",\"scale\":{:.17g}", piece.scale);
  }
  return out + "}";
}

// The inside of a part, without braces.
std::string PartText(const StepModel& step, const RankTensor& tensor, const RankCoordinate& rank) {
  std::string pieces;
  for (const Piece& piece : tensor.local->pieces) {
    pieces += StrCat(pieces.empty() ? "" : ",", PieceText(piece, tensor.local->shape));
  }
  std::string out =
      StrCat("\"global_shape\":", List(step.atom(tensor.atom).shape), ",\"pieces\":[", pieces, "]");
  if (tensor.flat) {
    const auto [begin, end] = tensor.RangeOf(rank);
    out += StrCat(",\"local_shape\":", List(tensor.local->shape), ",\"range\":[",
                  Padded(begin, tensor.elements), ",", Padded(end, tensor.elements), "]");
  }
  return out;
}

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kTrainable: return "trainable";
    case Role::kFrozen: return "frozen";
    case Role::kBuffer: return "buffer";
    case Role::kBeside: return "beside";
  }
  return "";
}

std::string TensorText(const StepModel& step, const RankTensor& tensor,
                       const RankCoordinate& rank) {
  std::string out = StrCat("{\"dtype\":\"", DTypeName(tensor.dtype),
                           "\",\"shape\":", List(tensor.shape), ",", PartText(step, tensor, rank));
  if (tensor.derived) {
    const Atom& atom = step.atom(tensor.atom);
    const Atom& from = step.atom(DerivedFrom(atom.source).value_or(tensor.atom));
    out += StrCat(",\"derived\":true,\"from\":", Quoted(from.kind));
  }
  return out + "}";
}

std::string CoordinateText(const Layout& layout, const RankCoordinate& rank) {
  const uint64_t experts =
      uint64_t{layout.tp} * layout.cp * layout.dp / (uint64_t{layout.ep} * layout.etp);
  return StrCat("{\"tp\":", rank.tp, ",\"cp\":", Padded(rank.cp, layout.cp - 1),
                ",\"dp\":", Padded(rank.dp, layout.dp - 1), ",\"pp\":", rank.pp,
                ",\"ep\":", rank.ep, ",\"etp\":", rank.etp,
                ",\"edp\":", Padded(rank.edp, experts - 1), "}");
}

void AppendTensors(std::string& out, std::string_view file, const StepModel& step,
                   const std::vector<RankTensor>& tensors, const RankCoordinate& rank) {
  out += StrCat(",\n \"", file, "\": {");
  bool first = true;
  for (const RankTensor& tensor : tensors) {
    out +=
        StrCat(first ? "\n  " : ",\n  ", Quoted(tensor.key), ": ", TensorText(step, tensor, rank));
    first = false;
  }
  out += first ? "}" : "\n }";
}

}  // namespace

std::map<std::string, std::string> RankMetadata(const StepModel& step,
                                                const std::vector<RankTensor>& tensors,
                                                const RankTensors& all,
                                                const RankCoordinate& rank) {
  std::map<std::string, std::string> metadata;
  std::string parts = "{";
  for (const RankTensor& tensor : tensors) {
    parts += StrCat(parts.size() == 1 ? "" : ",", Quoted(tensor.key), ":{",
                    PartText(step, tensor, rank), "}");
  }
  if (&tensors == &all.model) {
    for (const auto& [alias, key] : all.aliases) metadata.emplace(alias, key);
  }
  metadata["format"] = "pt";
  metadata["ckptfs.parts"] = parts + "}";
  return metadata;
}

std::string RankInfo(const ShownState& shown, uint64_t rank, const RankTensors& tensors) {
  const StepModel& step = shown.step();
  const Layout& layout = shown.layout();
  const RankCoordinate at = CoordinateOf(layout, rank);
  std::string out = StrCat(
      "{\"step\": ", Quoted(step.id), ", \"iteration\": ", step.iteration,
      ", \"framework\": ", Quoted(step.framework), ",\n \"layout\": ", Quoted(layout.ToString()),
      ", \"world\": ", layout.World(), ", \"rank\": ", Padded(rank, layout.World() - 1),
      ", \"coordinate\": ", CoordinateText(layout, at), ",\n \"aliases\": {");
  bool first = true;
  for (const auto& [alias, key] : tensors.aliases) {
    out += StrCat(first ? "" : ", ", Quoted(alias), ": ", Quoted(key));
    first = false;
  }
  out += "},\n \"left_out\": [";
  for (size_t i = 0; i < tensors.left_out.size(); ++i) {
    out += StrCat(i == 0 ? "" : ", ", Quoted(tensors.left_out[i]));
  }
  out += "],\n \"roles\": {";
  first = true;
  for (const RankTensor& tensor : tensors.model) {
    const Role role = step.parameter(tensor.parameter).role;
    if (role == Role::kTrainable) continue;
    out += StrCat(first ? "" : ", ", Quoted(tensor.key), ": \"", RoleName(role), "\"");
    first = false;
  }
  out += "}";
  AppendTensors(out, "model", step, tensors.model, at);
  AppendTensors(out, "optimizer", step, tensors.optimizer, at);
  return out + "}\n";
}

}  // namespace ckptfs
