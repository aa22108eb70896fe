// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/capture_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/base/strings.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

std::string KeyOf(const CapturedTensor& tensor) {
  if (!tensor.key.empty()) return tensor.key;
  std::string key = tensor.parameter;
  if (tensor.kind != "weight") key = StrCat(tensor.kind, "/", key);
  if (!tensor.optimizer.empty()) key = StrCat(tensor.optimizer, "/", key);
  return key;
}

// In as many characters as `greatest` takes, so that the headers of ranks that differ in
// such numbers alone are equally long, and their tensors lie at the same bytes.
std::string Number(uint64_t number, uint64_t greatest) {
  std::string text = std::to_string(number);
  const size_t width = std::to_string(greatest).size();
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

std::string RangeOf(uint64_t begin, uint64_t end, uint64_t greatest) {
  return StrCat("[", Number(begin, greatest), ",", Number(end, greatest), "]");
}

std::string PieceOf(const StateBox& piece, const Shape& whole) {
  std::string box;
  std::string at;
  for (size_t d = 0; d < piece.begin.size(); ++d) {
    const char* comma = d > 0 ? "," : "";
    box += StrCat(comma, RangeOf(piece.begin[d], piece.end[d], whole[d]));
    at += StrCat(comma, Number(piece.at[d], whole[d]));
  }
  return StrCat("{\"box\":[", box, "],\"at\":[", at, "]}");
}

// REQUIRES: LocalRangeOf says that it is one.
std::string MembersOf(const StatePart& part) {
  std::string members = StrCat(",\"shape\":", Json(part.shape).dump());
  if (!part.pieces.empty()) {
    std::string pieces;
    for (const StateBox& piece : part.pieces) {
      pieces += StrCat(pieces.empty() ? "" : ",", PieceOf(piece, part.shape));
    }
    members += StrCat(",\"pieces\":[", pieces, "]");
  }
  if (part.flat) {
    const uint64_t all = *ElementCount(part.local_shape ? *part.local_shape : part.shape);
    members += StrCat(",\"flat\":", RangeOf((*part.flat)[0], (*part.flat)[1], all));
  }
  if (part.local_shape) members += StrCat(",\"local_shape\":", Json(*part.local_shape).dump());
  if (!part.order.empty()) members += StrCat(",\"order\":", Json(part.order).dump());
  return members;
}

TensorUse UseOf(const CapturedTensor& tensor) {
  if (tensor.part) return TensorUse::kPart;
  return tensor.parameter.empty() ? TensorUse::kPickle : TensorUse::kWhole;
}

// kInvalid if a text is not UTF-8.
Result<std::string> WordsOf(const std::string& key, const CapturedTensor& tensor) {
  Json json{{"parameter", tensor.parameter},
            {"kind", tensor.kind},
            {"optimizer", tensor.optimizer},
            {"number", tensor.number}};
  try {
    std::string words = json.dump();
    words.pop_back();  // the brace
    return StrCat(Json(key).dump(), ":", words, tensor.part ? MembersOf(*tensor.part) : "", "}");
  } catch (const Json::exception&) {
    return Fail(ErrorCode::kInvalid, "snapshot: a name is not UTF-8");
  }
}

}  // namespace

bool PlannedTensor::Before(const PlannedTensor& other) const {
  return std::tuple(BitWidth(other.entry.dtype), lazy, use) <
         std::tuple(BitWidth(entry.dtype), other.lazy, other.use);
}

Result<CapturePlan> CapturePlan::Make(std::vector<CapturedTensor> tensors) {
  CapturePlan plan;
  for (size_t i = 0; i < tensors.size(); ++i) {
    CapturedTensor& tensor = tensors[i];
    std::string key = KeyOf(tensor);
    if (!plan.keys_.insert(key).second) {
      return Fail(ErrorCode::kInvalid, StrCat("snapshot: there are two tensors '", key, "'"));
    }
    if (tensor.part) {
      auto checked = LocalRangeOf(*tensor.part, tensor.shape);
      if (!checked) return Fail(std::move(checked).error().WithContext("snapshot: " + key));
      plan.ordered_ = plan.ordered_ || !tensor.part->order.empty();
    }
    if (!tensor.parameter.empty()) {
      CKPT_ASSIGN_OR_RETURN(const std::string words, WordsOf(key, tensor));
      if (!plan.words_.empty()) plan.words_ += ',';
      plan.words_ += words;
    }
    plan.tensors_.push_back({{std::move(key), tensor.dtype, std::move(tensor.shape), 0, 0},
                             i,
                             tensor.device,
                             tensor.lazy,
                             UseOf(tensor)});
  }
  std::ranges::stable_sort(
      plan.tensors_, [](const PlannedTensor& a, const PlannedTensor& b) { return a.Before(b); });
  return plan;
}

}  // namespace ckptfs
