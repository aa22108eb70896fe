// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_info.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <set>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/universal/universal_cut.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {
namespace {

using Kind = UniversalCut::Kind;

// The properties of a cut that the pattern lists tell apart, with the global shape where
// the list states it.
struct Entry {
  UniversalCut cut;
  Shape shape;                         // kParts only
  std::vector<uint64_t> widths;        // kParts only: row-major [part][rank]
  uint64_t rows = 0, padded_rows = 0;  // kVocabulary only
  bool operator==(const Entry&) const = default;
};

constexpr std::array<std::string_view, 12> kOurKeys = {"universal_checkpoint_version",
                                                       "original_vocab_size",
                                                       "padded_vocab_size",
                                                       "vocabulary_parameter_patterns",
                                                       "pipeline_replicated_parameter_patterns",
                                                       "parameter_to_average_patterns",
                                                       "parameter_with_row_parallelism_patterns",
                                                       "tp_replicated_parameter_patterns",
                                                       "parameter_with_2_sub_params_cat_dim_0",
                                                       "parameter_with_sub_params",
                                                       "sub_param_shard_widths",
                                                       "affine_map"};

// The widths that the ranks of the layout hold of each part; nothing if they are not whole.
std::vector<uint64_t> WidthsOf(const StepModel& step, const Parameter& parameter,
                               const UniversalCut& cut, const Layout& layout) {
  if (parameter.source_pattern && layout.tp == step.layout.tp &&
      parameter.source_pattern->cuts.size() == 1 &&
      parameter.source_pattern->cuts[0].parts == cut.parts) {
    return parameter.source_pattern->cuts[0].widths;
  }
  std::vector<uint64_t> widths;
  for (uint64_t part : cut.parts) {
    if (part % layout.tp != 0) return {};
    widths.insert(widths.end(), layout.tp, part / layout.tp);
  }
  return widths;
}

Entry EntryOf(const StepModel& step, const Parameter& parameter, const UniversalCut& cut,
              const Layout& layout) {
  Entry entry{cut, {}, {}, 0, 0};
  const bool two_rows = cut.kind == Kind::kEqualParts && cut.parts.size() == 2 && cut.dim == 0;
  if (cut.kind == Kind::kEqualParts && !two_rows) entry.cut.kind = Kind::kParts;
  if (entry.cut.kind == Kind::kParts) {
    entry.shape = parameter.shape;
    entry.widths = WidthsOf(step, parameter, cut, layout);
  }
  if (cut.kind == Kind::kVocabulary) {
    const Cut& along = parameter.pattern.cuts[0];
    const uint64_t unit = std::max<uint64_t>(along.pad_multiple, 1) * layout.tp;
    const bool padded = layout.tp > 1 || along.pad_always;
    entry.rows = parameter.shape[0];
    entry.padded_rows = padded ? CeilDiv(entry.rows, unit) * unit : entry.rows;
  }
  return entry;
}

// Patterns with what they stand for: one per name, or one for all layers where
// every name it matches says the same.
std::vector<std::pair<std::string, Entry>> Patterns(const ShownState& shown) {
  const StepModel& step = shown.step();
  std::map<std::string, std::vector<std::pair<std::string, Entry>>> classes;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const Parameter& parameter = step.parameters[i];
    if (parameter.role != Role::kTrainable || parameter.expert) continue;
    auto cut = CutOf(parameter);
    if (!cut || cut->kind == Kind::kUnknown) continue;
    const std::string& name = shown.NameOf(ParameterIndex{i});
    classes[PatternOfName(name, true)].emplace_back(PatternOfName(name, false),
                                                    EntryOf(step, parameter, *cut, shown.layout()));
  }
  std::vector<std::pair<std::string, Entry>> patterns;
  for (const auto& [pattern, members] : classes) {
    const Entry& first = members[0].second;
    const bool same = std::all_of(members.begin(), members.end(),
                                  [&](const auto& member) { return member.second == first; });
    if (same) patterns.emplace_back(pattern, first);
    if (!same) patterns.insert(patterns.end(), members.begin(), members.end());
  }
  return patterns;
}

class InfoBuilder {
 public:
  InfoBuilder(const Layout& layout, PickleBuilder& pickle) : layout_(layout), pickle_(pickle) {}

  void Add(const std::string& pattern, const Entry& entry) {
    switch (entry.cut.kind) {
      case Kind::kReplicated:
        lists_["tp_replicated_parameter_patterns"].push_back(pickle_.String(pattern));
        break;
      case Kind::kVocabulary:
        lists_["vocabulary_parameter_patterns"].push_back(pickle_.String(pattern));
        rows_ = entry.rows;
        padded_rows_ = entry.padded_rows;
        break;
      case Kind::kAlong:
        if (entry.cut.dim == 1) {
          lists_["parameter_with_row_parallelism_patterns"].push_back(pickle_.String(pattern));
        }
        break;
      case Kind::kEqualParts:
        lists_["parameter_with_2_sub_params_cat_dim_0"].push_back(pickle_.String(pattern));
        break;
      case Kind::kParts: AddParts(pattern, entry); break;
      case Kind::kUnknown: break;
    }
  }

  PickleItems Finish() {
    PickleItems items;
    items.emplace_back(pickle_.String("universal_checkpoint_version"), pickle_.Float(0.4));
    if (rows_ > 0) {
      items.emplace_back(pickle_.String("original_vocab_size"), Number(rows_));
      items.emplace_back(pickle_.String("padded_vocab_size"), Number(padded_rows_));
    }
    for (auto& [key, values] : lists_) {
      items.emplace_back(pickle_.String(key), pickle_.List(std::move(values)));
    }
    if (!widths_.empty()) {
      items.emplace_back(pickle_.String("sub_param_shard_widths"), pickle_.Dict(widths_));
    }
    return items;
  }

 private:
  NodeId Number(uint64_t value) { return pickle_.Int(static_cast<int64_t>(value)); }

  void AddParts(const std::string& pattern, const Entry& entry) {
    std::vector<NodeId> shape, parts, widths;
    for (uint64_t part : entry.cut.parts) parts.push_back(Number(part));
    for (size_t at = 0; at < entry.widths.size(); at += layout_.tp) {
      std::vector<NodeId> ranks;
      for (uint32_t r = 0; r < layout_.tp; ++r) ranks.push_back(Number(entry.widths[at + r]));
      widths.push_back(pickle_.List(std::move(ranks)));
    }
    const NodeId part_tuple = pickle_.Tuple(std::move(parts));
    for (size_t d = 0; d < entry.shape.size(); ++d) {
      shape.push_back(d == entry.cut.dim ? part_tuple : Number(entry.shape[d]));
    }
    const NodeId patterns = pickle_.List({pickle_.String(pattern)});
    lists_["parameter_with_sub_params"].push_back(
        pickle_.Dict({{pickle_.String("patterns"), patterns},
                      {pickle_.String("shape"), pickle_.Tuple(std::move(shape))},
                      {pickle_.String("partition_dim"), Number(entry.cut.dim)}}));
    if (widths.empty()) return;
    widths_.emplace_back(pickle_.String(pattern), pickle_.List(std::move(widths)));
  }

  const Layout& layout_;
  PickleBuilder& pickle_;
  std::map<std::string, std::vector<NodeId>> lists_;
  PickleItems widths_;
  uint64_t rows_ = 0, padded_rows_ = 0;
};

}  // namespace

std::string PatternOfName(std::string_view name, bool any_number) {
  static constexpr std::string_view kSpecial = "\\.^$*+?{}[]|()";
  std::string out = "^";
  for (size_t i = 0; i < name.size();) {
    const size_t end = std::min(name.find('.', i), name.size());
    const std::string_view component = name.substr(i, end - i);
    const bool number =
        !component.empty() && std::all_of(component.begin(), component.end(),
                                          [](char c) { return c >= '0' && c <= '9'; });
    if (number && any_number) {
      out += "\\d+";
    } else {
      for (char c : component) {
        if (kSpecial.find(c) != std::string_view::npos) out += '\\';
        out += c;
      }
    }
    if (end < name.size()) out += "\\.";
    i = end + 1;
  }
  return out + "$";
}

Result<NodeId> UniversalInfo(const ShownState& shown, const Document* source,
                             ArchiveBuilder& archive) {
  const Layout& layout = shown.layout();
  InfoBuilder builder(layout, archive.pickle());
  for (const auto& [pattern, entry] : Patterns(shown)) builder.Add(pattern, entry);
  PickleItems items = builder.Finish();
  if (source != nullptr) {
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*source));
    for (const auto& [key, value] : RootOf(tree).Items()) {
      const std::string_view name = key.String().value_or("");
      // How the source's ranks were cut stays true of its names.
      const bool map = name == "affine_map" && (layout.naming == Naming::kAsSource ||
                                                layout.naming == shown.step().layout.naming);
      if (!map && std::find(kOurKeys.begin(), kOurKeys.end(), name) != kOurKeys.end()) continue;
      if (!source->tensors.empty()) continue;
      const NodeId kept = archive.pickle().Copy(key);
      items.emplace_back(kept, archive.pickle().Copy(value));
    }
  }
  return archive.pickle().Dict(items);
}

}  // namespace ckptfs::deepspeed
