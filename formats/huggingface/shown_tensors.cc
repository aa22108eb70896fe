// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/shown_tensors.h"

#include <array>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"
#include "formats/tools/tool_files.h"

namespace ckptfs::huggingface {
namespace {

// Prefixes of names that no model of transformers has.
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> kForeign = {{
    {"base_layer.", "a layer that PEFT wraps, whose adapter would be lost"},
    {"lora_", "an adapter (PEFT)"},
    {"original_module.", "a module that PEFT wraps"},
    {"modules_to_save.", "a module that PEFT wraps"},
    {"deepspeed_moe.", "DeepSpeed's own experts, which transformers does not have"},
}};

Status CheckName(const std::string& name) {
  for (const auto& [part, what] : kForeign) {
    const size_t at = name.find(part);
    const bool component = at != std::string::npos && (at == 0 || name[at - 1] == '.');
    if (!component) continue;
    return Fail(Error{ErrorCode::kUnsupported, StrCat("it belongs to ", what)}.OfParameter(name));
  }
  return {};
}

// Takes the first of each parameter's names that is not a head's; its own if all are.
std::vector<const std::string*> KeptNames(const ShownState& shown) {
  std::vector<const std::string*> kept;
  for (uint32_t i = 0; i < shown.step().parameters.size(); ++i) {
    kept.push_back(&shown.NameOf(ParameterIndex{i}));
  }
  for (const Alias& alias : shown.aliases()) {
    const std::string*& name = kept[static_cast<uint32_t>(alias.parameter)];
    if (IsHead(*name) && !IsHead(alias.name)) name = &alias.name;
  }
  return kept;
}

// The tensor under a name, whole.
Result<ShownTensor> Whole(const ShownState& shown, ParameterIndex index, std::string name) {
  const Parameter& parameter = shown.step().parameter(index);
  ShownTensor tensor;
  tensor.name = std::move(name);
  CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown.WeightOf(index));
  tensor.atom = weight.atom;
  tensor.dtype = weight.dtype;
  tensor.local = std::make_shared<const LocalTensor>(WholeTensor(parameter.shape));
  CKPT_ASSIGN_OR_RETURN(tensor.elements, ElementCount(parameter.shape));
  CKPT_ASSIGN_OR_RETURN(tensor.bytes, ByteCount(parameter.shape, tensor.dtype));
  tensor.trainable = parameter.role != Role::kBuffer;
  return tensor;
}

// The part of `name` before the model's own: the first word with its dot.
std::string_view AttributeOf(std::string_view name) { return name.substr(0, name.find('.') + 1); }

// A LightningModule has the model in an attribute, whose name every parameter then begins
// with.  Where it has several nothing says which is the model, and names stay.
Status TakeAttributeOff(const StepModel& step, std::vector<ShownTensor>& tensors) {
  const auto files = ToolFilesOf(step);
  if (!files || files->tool != StepTool::kLightning || tensors.empty()) return {};
  const std::string attribute(AttributeOf(tensors.front().name));
  for (const ShownTensor& tensor : tensors) {
    if (AttributeOf(tensor.name) != attribute || tensor.name.size() == attribute.size()) return {};
  }
  for (ShownTensor& tensor : tensors) tensor.name.erase(0, attribute.size());
  return {};
}

}  // namespace

bool IsHead(std::string_view name) {
  return name == "lm_head.weight" || name.ends_with(".lm_head.weight") ||
         name == "embed_out.weight" || name.ends_with(".decoder.weight");
}

Status CheckForeign(const ShownState& shown) {
  const StepModel& step = shown.step();
  const auto names = KeptNames(shown);
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (IsOfModel(step.parameters[i])) CKPT_RETURN_IF_ERROR(CheckName(*names[i]));
  }
  return {};
}

Result<std::vector<ShownTensor>> ShowTensors(const ShownState& shown) {
  const StepModel& step = shown.step();
  std::vector<ShownTensor> out;
  std::set<std::string> seen;
  const auto names = KeptNames(shown);
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const Parameter& parameter = step.parameters[i];
    if (!IsOfModel(parameter)) continue;
    const std::string& kept = *names[i];
    CKPT_RETURN_IF_ERROR(CheckName(kept));
    std::string name = NormaliseName(kept);
    if (!seen.insert(name).second) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("two parameters are '", name, "' without the words of wrappers"));
    }
    CKPT_ASSIGN_OR_RETURN(ShownTensor tensor, Whole(shown, ParameterIndex{i}, std::move(name)));
    out.push_back(std::move(tensor));
  }
  CKPT_RETURN_IF_ERROR(TakeAttributeOff(step, out));
  return out;
}

Result<std::vector<ShownTensor>> ShowAdapter(const ShownState& shown) {
  std::vector<ShownTensor> out;
  for (uint32_t i = 0; i < shown.step().parameters.size(); ++i) {
    if (!IsOfModel(shown.step().parameters[i])) continue;
    CKPT_ASSIGN_OR_RETURN(ShownTensor tensor,
                          Whole(shown, ParameterIndex{i}, shown.NameOf(ParameterIndex{i})));
    out.push_back(std::move(tensor));
  }
  return out;
}

}  // namespace ckptfs::huggingface
