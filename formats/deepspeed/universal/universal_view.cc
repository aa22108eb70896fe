// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_view.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <span>

#include "core/base/strings.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/engine_dict.h"
#include "formats/deepspeed/engine_settings.h"
#include "formats/deepspeed/universal/universal_files.h"
#include "formats/deepspeed/universal/universal_index.h"
#include "formats/deepspeed/universal/universal_readers.h"
#include "formats/settle/united_groups.h"
#include "formats/torch/pickle/pickle_reader.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kTopName = "deepspeed";
constexpr std::string_view kModelPrefix = "mp_rank_";
constexpr std::string_view kModelPrefixStage3 = "zero_pp_rank_0_mp_rank_";
constexpr std::string_view kModelSuffix = "_model_states.pt";
// The zip's top folder in every model file, so that equal files are equal.
constexpr std::string_view kModelFolder = "model_states";
constexpr std::string_view kOptimizerFile = "optimizer_state.pt";

ViewEntry File(std::string_view name, uint64_t size) {
  return ViewEntry::File(name, size, Reading::kOnce);
}
ViewEntry Symlink(std::string_view name, const std::string& target) {
  return {std::string(name), ViewEntry::Type::kSymlink, target.size(), target, Reading::kRandom};
}

std::string ModelFile(std::string_view prefix, uint32_t rank) {
  return StrCat(prefix, rank < 10 ? "0" : "", rank, kModelSuffix);
}

// The rank of a model file's name in its one spelling.
std::optional<uint32_t> ModelRank(std::string_view name) {
  for (std::string_view prefix : {kModelPrefixStage3, kModelPrefix}) {
    if (!name.starts_with(prefix) || !name.ends_with(kModelSuffix)) continue;
    uint32_t rank = 0;
    const char* begin = name.data() + prefix.size();
    std::from_chars(begin, name.data() + name.size(), rank);
    if (name == ModelFile(prefix, rank)) return rank;
  }
  return std::nullopt;
}

// torch.save names the zip's folder after the file.
std::string_view FolderOf(std::string_view file) {
  return file.substr(0, file.size() - std::string_view(".pt").size());
}

// The components of a path.
std::vector<std::string_view> Split(std::string_view path) {
  std::vector<std::string_view> parts;
  while (!path.empty()) {
    const size_t slash = std::min(path.find('/'), path.size());
    parts.push_back(path.substr(0, slash));
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  return parts;
}

// The meaning of a path in the directory.
struct Place {
  enum class Kind { kTop, kPointer, kTag, kModel, kZero, kOptimizer, kParameter, kLink, kState };
  Kind kind = Kind::kTop;
  uint32_t rank = 0;                              // kModel
  const UniversalParameter* parameter = nullptr;  // kParameter, kState
  const UniversalState* state = nullptr;          // kState
  const std::string* target = nullptr;            // kLink
};

std::optional<Place> LocateInZero(const UniversalIndex& index,
                                  std::span<const std::string_view> parts) {
  if (parts.empty()) return Place{Place::Kind::kZero};
  if (parts.size() == 1 && parts[0] == kOptimizerFile) return Place{Place::Kind::kOptimizer};
  Place place;
  place.parameter = index.Find(parts[0]);
  if (place.parameter == nullptr) {
    auto link = index.links.find(std::string(parts[0]));
    if (link == index.links.end() || parts.size() > 1) return std::nullopt;
    place.kind = Place::Kind::kLink;
    place.target = &link->second;
    return place;
  }
  place.kind = Place::Kind::kParameter;
  if (parts.size() == 1) return place;
  if (parts.size() > 2 || !parts[1].ends_with(".pt")) return std::nullopt;
  place.kind = Place::Kind::kState;
  for (const UniversalState& state : place.parameter->states) {
    if (state.file == FolderOf(parts[1])) place.state = &state;
  }
  return place.state != nullptr ? std::optional(place) : std::nullopt;
}

std::optional<Place> Locate(const UniversalIndex& index, std::span<const std::string_view> parts) {
  if (parts.empty() || parts[0] != kTopName) return std::nullopt;
  if (parts.size() == 1) return Place{Place::Kind::kTop};
  if (parts[1] != index.tag) {
    const bool pointer = parts[1] == "latest" || parts[1] == "latest_universal";
    if (!pointer || parts.size() > 2) return std::nullopt;
    return Place{Place::Kind::kPointer};
  }
  if (parts.size() == 2) return Place{Place::Kind::kTag};
  if (parts[2] == "zero") return LocateInZero(index, parts.subspan(3));
  const std::optional<uint32_t> rank = ModelRank(parts[2]);
  if (!rank || *rank >= index.model_files || parts.size() > 3) return std::nullopt;
  Place place{Place::Kind::kModel};
  place.rank = *rank;
  return place;
}

// The sizes of the files that are not per parameter.
struct FixedSizes {
  std::map<uint32_t, uint64_t> model;  // by source rank
  uint64_t optimizer = 0;
};

class UniversalView : public View {
 public:
  UniversalView(std::shared_ptr<const ShownState> shown, UniversalIndex index, FixedSizes sizes,
                std::vector<std::string> left_out)
      : View(shown->shared_step()),
        shown_(std::move(shown)),
        index_(std::move(index)),
        sizes_(std::move(sizes)),
        left_out_(std::move(left_out)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  std::vector<std::string> LeftOut() const override { return left_out_; }
  uint64_t MemoryBytes() const override {
    return sizeof(*this) + index_.MemoryBytes() + sizes_.model.size() * 8 * sizeof(uint64_t);
  }

 private:
  std::vector<std::string> NamesIn(std::string_view directory) const;

  const std::shared_ptr<const ShownState> shown_;
  const UniversalIndex index_;
  const FixedSizes sizes_;
  const std::vector<std::string> left_out_;
};

Result<ViewEntry> UniversalView::Find(std::string_view path) const {
  const auto parts = Split(path);
  const auto place = Locate(index_, parts);
  if (!place) return NotInView(path);
  const std::string_view name = parts.back();
  switch (place->kind) {
    case Place::Kind::kTop:
    case Place::Kind::kTag:
    case Place::Kind::kZero:
    case Place::Kind::kParameter: return ViewEntry::Folder(name);
    case Place::Kind::kPointer: return File(name, index_.tag.size());
    case Place::Kind::kLink: return Symlink(name, *place->target);
    case Place::Kind::kModel:
      return File(name, sizes_.model.at(SourceRank(shown_->step(), index_, place->rank)));
    case Place::Kind::kOptimizer: return File(name, sizes_.optimizer);
    case Place::Kind::kState: {
      CKPT_ASSIGN_OR_RETURN(const ArchiveContent content,
                            ParameterState(*shown_, *place->parameter, *place->state));
      CKPT_ASSIGN_OR_RETURN(const uint64_t size, content.Size(place->state->file));
      return File(name, size);
    }
  }
  return NotInView(path);
}

std::vector<std::string> UniversalView::NamesIn(std::string_view directory) const {
  const auto place = Locate(index_, Split(directory));
  std::vector<std::string> names;
  if (!place) return names;
  if (place->kind == Place::Kind::kTop) names = {"latest", "latest_universal", index_.tag};
  if (place->kind == Place::Kind::kTag) {
    for (uint32_t rank = 0; rank < index_.model_files; ++rank) {
      names.push_back(ModelFile(kModelPrefix, rank));
      names.push_back(ModelFile(kModelPrefixStage3, rank));
    }
    names.emplace_back("zero");
  }
  if (place->kind == Place::Kind::kZero) {
    names.emplace_back(kOptimizerFile);
    for (const UniversalParameter& parameter : index_.parameters) names.push_back(parameter.name);
    for (const auto& link : index_.links) names.push_back(link.first);
  }
  if (place->kind == Place::Kind::kParameter) {
    for (const UniversalState& state : place->parameter->states) {
      names.push_back(state.file + ".pt");
    }
  }
  return names;
}

Result<std::vector<ViewEntry>> UniversalView::List(std::string_view directory) const {
  if (directory.empty()) return std::vector<ViewEntry>{ViewEntry::Folder(kTopName)};
  std::vector<ViewEntry> entries;
  for (const std::string& name : NamesIn(directory)) {
    CKPT_ASSIGN_OR_RETURN(ViewEntry entry, Find(StrCat(directory, "/", name)));
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return NotInView(directory);
  return entries;
}

Result<Plan> UniversalView::MakePlan(std::string_view file) const {
  const auto parts = Split(file);
  const auto place = Locate(index_, parts);
  if (!place) return NotInView(file);
  Result<ArchiveContent> content = NotInView(file);
  switch (place->kind) {
    case Place::Kind::kPointer: {
      PlanBuilder plan;
      plan.Literal(index_.tag);
      return std::move(plan).Finish();
    }
    case Place::Kind::kModel:
      content = ModelStatesFile(*shown_, SourceRank(shown_->step(), index_, place->rank));
      if (!content) return Fail(std::move(content).error());
      return std::move(*content).MakePlan(kModelFolder);
    case Place::Kind::kOptimizer: content = OptimizerState(*shown_, index_); break;
    case Place::Kind::kState:
      content = ParameterState(*shown_, *place->parameter, *place->state);
      break;
    default: return NotInView(file);
  }
  if (!content) return Fail(std::move(content).error());
  return std::move(*content).MakePlan(FolderOf(parts.back()));
}

Result<FixedSizes> SizesOf(const ShownState& shown, const UniversalIndex& index) {
  FixedSizes sizes;
  for (uint32_t rank = 0; rank < index.model_files; ++rank) {
    const uint32_t source_rank = SourceRank(shown.step(), index, rank);
    if (sizes.model.contains(source_rank)) continue;
    CKPT_ASSIGN_OR_RETURN(const ArchiveContent content, ModelStatesFile(shown, source_rank));
    CKPT_ASSIGN_OR_RETURN(sizes.model[source_rank], content.Size(kModelFolder));
  }
  CKPT_ASSIGN_OR_RETURN(const ArchiveContent optimizer, OptimizerState(shown, index));
  CKPT_ASSIGN_OR_RETURN(sizes.optimizer, optimizer.Size(FolderOf(kOptimizerFile)));
  return sizes;
}

// An engine takes hyper-parameters by the number of its group.
Status CheckGroups(const StepModel& step) {
  const auto apart =
      std::ranges::find_if(step.groups.rbegin(), step.groups.rend(),
                           [](const Group& group) { return group.number.has_value(); });
  if (apart == step.groups.rend()) return {};
  const auto first = std::ranges::find_if(step.groups, [&](const Group& group) {
    return group.optimizer == apart->optimizer && group.number == apart->number;
  });
  const auto name = [&](const Group& group) {
    const auto& members = group.parameters;
    return members.empty() ? std::string("?") : step.parameter(members[0]).name;
  };
  return Fail(ErrorCode::kUnsupported, StrCat("group ", *apart->number,
                                              " of the optimizer has other hyper-parameters on one "
                                              "pipeline stage ('",
                                              name(*first), "') than on another ('", name(*apart),
                                              "'), but an engine takes groups by number"));
}

// Returns a line on what the loader restores in no engine; empty if
// there is nothing of that kind, or if the step is read by another way.
std::string NotLoaded(const ShownState& shown) {
  if (shown.states().empty()) return "";
  const Parameter* first = nullptr;
  size_t count = 0;
  for (const Parameter& parameter : shown.step().parameters) {
    if (parameter.role == Role::kTrainable || !IsOfModel(parameter)) continue;
    if (first == nullptr) first = &parameter;
    ++count;
  }
  if (first == nullptr) return "";
  return StrCat("frozen parameters and buffers ('", first->name, "'",
                count > 1 ? StrCat(" and ", count - 1, " more") : "",
                "), which an engine does not take from such a directory: rank<N>/model.* has them");
}

// The loader gives partitions their elements in the order without round robin
// (tensor_fragment.py, 0.19.7), and says nothing.
Result<bool> DealsGradients(const ShownState& shown) {
  const Layout& layout = shown.layout();
  if (layout.dp < 2 || layout.zero == 3) return false;
  CKPT_ASSIGN_OR_RETURN(const auto settings, EngineSettingsOf(shown.step()));
  return settings && settings->deals;
}

Result<std::vector<std::string>> LeftOutOf(const ShownState& shown, const UniversalIndex& index) {
  std::vector<std::string> lines;
  CKPT_ASSIGN_OR_RETURN(std::string hyper_parameters, HyperParametersLeftOut(shown));
  if (!hyper_parameters.empty()) lines.push_back(std::move(hyper_parameters));
  for (const std::string& line : index.left_out) lines.push_back(line);
  std::string unloaded = NotLoaded(shown);
  if (!unloaded.empty()) lines.push_back(std::move(unloaded));
  if (ScalesAnew(shown) && shown.step().FindDocument(kLossScaler) != nullptr) {
    lines.push_back(
        "the loss scale: fp16 alone has one, so an engine of the other precision keeps its own");
  }
  CKPT_ASSIGN_OR_RETURN(const bool dealt, DealsGradients(shown));
  if (dealt) {
    lines.push_back(
        "round_robin_gradients, which the source's configuration has: an engine with it mixes up "
        "the tensors of such a directory, so its configuration must not have it");
  }
  if (shown.layout().zero == 3 && shown.step().groups.size() > 1 && !shown.states().empty()) {
    lines.push_back(
        "counts of steps by group: an engine at ZeRO 3 gives all sub-groups one "
        "tensor; a torch "
        "optimizer raises it once for each, so that bias corrections are those of "
        "later steps");
  }
  return lines;
}

}  // namespace

Result<std::shared_ptr<const View>> UniversalFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const Layout& layout = shown->layout();
  CKPT_ASSIGN_OR_RETURN(UniversalIndex index, BuildUniversalIndex(*shown));
  if (index.tag == "latest" || index.tag == "latest_universal") {
    return Fail(ErrorCode::kUnsupported, "the tag is named like DeepSpeed's own pointer file");
  }
  CKPT_RETURN_IF_ERROR(CheckGroups(shown->step()));
  CKPT_RETURN_IF_ERROR(CheckDemands(*shown, UniversalReader(layout), layout));
  CKPT_ASSIGN_OR_RETURN(FixedSizes sizes, SizesOf(*shown, index));
  CKPT_ASSIGN_OR_RETURN(std::vector<std::string> left_out, LeftOutOf(*shown, index));
  return std::make_shared<const UniversalView>(std::move(shown), std::move(index), std::move(sizes),
                                               std::move(left_out));
}

}  // namespace ckptfs::deepspeed
