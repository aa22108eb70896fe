// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/capture_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
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

Json PiecesOf(const StatePart& part) {
  Json pieces = Json::array();
  for (const StateBox& piece : part.pieces) {
    Json box = Json::array();
    for (size_t d = 0; d < piece.begin.size(); ++d) {
      box.push_back(Json::array({piece.begin[d], piece.end[d]}));
    }
    pieces.push_back({{"box", std::move(box)}, {"at", piece.at}});
  }
  return pieces;
}

// kInvalid if a text is not UTF-8.
Result<std::string> WordsOf(const std::string& key, const CapturedTensor& tensor) {
  Json json{{"parameter", tensor.parameter},
            {"kind", tensor.kind},
            {"optimizer", tensor.optimizer},
            {"number", tensor.number}};
  if (tensor.part) {
    json["shape"] = tensor.part->shape;
    if (!tensor.part->pieces.empty()) json["pieces"] = PiecesOf(*tensor.part);
    if (tensor.part->flat) json["flat"] = *tensor.part->flat;
    if (tensor.part->local_shape) json["local_shape"] = *tensor.part->local_shape;
    if (!tensor.part->order.empty()) json["order"] = tensor.part->order;
  }
  try {
    return StrCat(Json(key).dump(), ":", json.dump());
  } catch (const Json::exception&) {
    return Fail(ErrorCode::kInvalid, "snapshot: a name is not UTF-8");
  }
}

}  // namespace

bool PlannedTensor::Before(const PlannedTensor& other) const {
  return std::pair(BitWidth(other.entry.dtype), lazy) <
         std::pair(BitWidth(entry.dtype), other.lazy);
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
    plan.tensors_.push_back(
        {{std::move(key), tensor.dtype, std::move(tensor.shape), 0, 0}, i, tensor.device, tensor.lazy});
  }
  std::ranges::stable_sort(plan.tensors_, [](const PlannedTensor& a, const PlannedTensor& b) {
    return a.Before(b);
  });
  return plan;
}

}  // namespace ckptfs
