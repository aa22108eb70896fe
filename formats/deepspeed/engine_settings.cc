// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/engine_settings.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "formats/deepspeed/document_keys.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {
namespace {

constexpr uint64_t kSubGroupSize = 1'000'000'000;
constexpr std::array<std::string_view, 4> kWide = {"fp32", "float32", "float", "torch.float32"};

bool IsEnabled(PickleRef root, std::string_view key) {
  return root[key]["enabled"].Bool().value_or(false);
}

std::optional<uint64_t> SubGroupSizeOf(PickleRef size) {
  if (!size) return kSubGroupSize;
  const auto number = size.Number();
  if (!number || *number < 0 || *number > 1e18) return std::nullopt;
  return static_cast<uint64_t>(*number);
}

}  // namespace

Result<std::optional<EngineSettings>> EngineSettingsOf(const StepModel& step) {
  const Document* document = step.FindDocument(kDsConfig);
  if (document == nullptr) return std::optional<EngineSettings>();
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  const PickleRef root = RootOf(tree);
  if (!root.IsDict()) return std::optional<EngineSettings>();
  const PickleRef zero = root["zero_optimization"];
  const PickleRef deals = zero["round_robin_gradients"];
  const auto gradients = root["data_types"]["grad_accum_dtype"].String().value_or("");
  EngineSettings out;
  out.bf16 = IsEnabled(root, "bf16") || IsEnabled(root, "bfloat16");
  out.deals = deals && deals.Bool() != false;
  out.aligns = zero["parameter_alignment"].Bool().value_or(false);
  out.wide_gradients = std::ranges::find(kWide, gradients) != kWide.end();
  out.offloads = zero["offload_optimizer"]["device"].String() == "cpu" ||
                 zero["cpu_offload"].Bool().value_or(false);
  out.sub_group_size = SubGroupSizeOf(zero["sub_group_size"]);
  return std::optional(out);
}

}  // namespace ckptfs::deepspeed
