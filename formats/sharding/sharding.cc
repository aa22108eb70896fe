// SPDX-License-Identifier: Apache-2.0

#include "formats/sharding/sharding.h"

#include <algorithm>
#include <numeric>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/source_pattern.h"

namespace ckptfs {

// The rules' answer before the shapes are applied.
struct ShardingRules::Decision {
  Pattern pattern;
  std::string rule;                           // for messages
  uint64_t part_count = 0;                    // equal parts whose size the shapes give
  std::vector<std::vector<uint64_t>> widths;  // [part][rank], if recorded
  std::optional<uint64_t> rows;               // of the unpadded dim
  bool decided = false;
  bool whole_each = false;  // every rank holds all of it, whatever the pattern says of others
};

namespace {

template <class... Pieces>
tl::unexpected<Error> RefuseParameter(std::string_view name, const Pieces&... pieces) {
  return Fail(Error{ErrorCode::kInvalid, StrCat(pieces...)}.OfParameter(name));
}

Result<std::vector<NamePattern>> WholeNamePatterns(const std::vector<std::string>& texts,
                                                   std::string_view flag) {
  std::vector<NamePattern> out;
  for (const std::string& text : texts) {
    auto pattern = NamePattern::Parse(StrCat("(?:", text, ")$"));
    if (!pattern) return Fail(std::move(pattern).error().WithContext(flag));
    out.push_back(*std::move(pattern));
  }
  return out;
}

// Pad and unit facts of the family for a cut that the checkpoint's lists made.
void AdoptFamilyFacts(const RuleMatch& family, Pattern& pattern) {
  if (pattern.cuts.size() != 1 || family.pattern.cuts.size() != 1) return;
  Cut& cut = pattern.cuts[0];
  const Cut& known = family.pattern.cuts[0];
  if (cut.dim != known.dim) return;
  cut.unit = known.unit;
  if (known.pad_multiple > 0) {
    cut.pad_multiple = known.pad_multiple;
    cut.pad_always = known.pad_always;
  }
}

Status CheckSameShapes(std::string_view name, std::span<const Shape> locals) {
  for (size_t r = 1; r < locals.size(); ++r) {
    if (locals[r] != locals[0]) {
      return RefuseParameter(name, "rank 0 holds ", ShapeToString(locals[0]),
                             ", "
                             "rank ",
                             r, " holds ", ShapeToString(locals[r]),
                             ", but a rule calls it whole on every rank");
    }
  }
  return {};
}

// Sum of the ranks' extents along `dim`, the other dims being equal.
Result<uint64_t> TotalAlong(std::string_view name, uint32_t dim, std::span<const Shape> locals) {
  uint64_t total = 0;
  for (const Shape& local : locals) {
    if (dim >= local.size() || local.size() != locals[0].size()) {
      return RefuseParameter(name, "cut along dim ", dim, ", which ", ShapeToString(local),
                             " does not have");
    }
    for (size_t d = 0; d < local.size(); ++d) {
      if (d != dim && local[d] != locals[0][d]) {
        return RefuseParameter(name, "cut along dim ", dim, ", but ranks differ in dim ", d);
      }
    }
    CKPT_ASSIGN_OR_RETURN(total, CheckedAdd(total, local[dim], "rows of a cut parameter"));
  }
  return total;
}

Result<std::vector<std::vector<uint64_t>>> EvenWidths(std::string_view name,
                                                      const std::vector<uint64_t>& parts,
                                                      size_t ranks) {
  std::vector<std::vector<uint64_t>> widths;
  for (uint64_t part : parts) {
    if (part % ranks != 0) {
      return RefuseParameter(name, "a fused part of ", part, " rows does not divide by ", ranks,
                             " ranks");
    }
    widths.emplace_back(ranks, part / ranks);
  }
  return widths;
}

Status CheckWidths(std::string_view name, uint32_t dim, std::span<const Shape> locals,
                   const std::vector<uint64_t>& parts,
                   const std::vector<std::vector<uint64_t>>& widths) {
  if (widths.size() != parts.size()) {
    return RefuseParameter(name, widths.size(), " rows of shard widths for ", parts.size(),
                           " parts");
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    const uint64_t sum = std::accumulate(widths[p].begin(), widths[p].end(), uint64_t{0});
    if (widths[p].size() != locals.size() || sum != parts[p]) {
      return RefuseParameter(name, "the shard widths of part ", p, " do not make up its ", parts[p],
                             " rows");
    }
  }
  for (size_t r = 0; r < locals.size(); ++r) {
    uint64_t rows = 0;
    for (const auto& part : widths) rows += part[r];
    if (rows != locals[r][dim]) {
      return RefuseParameter(name, "rank ", r, " should hold ", rows, " rows of dim ", dim,
                             ", but its tensor has ", locals[r][dim]);
    }
  }
  return {};
}

}  // namespace

Sharding ReplicatedSharding(const Shape& shape, uint32_t ranks) {
  Sharding out;
  out.how = Sharding::How::kReplicas;
  out.pattern = Pattern::Replicate();
  out.shape = shape;
  out.locals.assign(ranks, WholeTensor(shape));
  return out;
}

LocalTensor LocalOfWidths(const Shape& atom, uint32_t dim,
                          const std::vector<std::vector<uint64_t>>& widths, uint32_t rank) {
  LocalTensor local;
  local.shape = atom;
  local.shape[dim] = 0;
  for (const auto& part : widths) local.shape[dim] += part[rank];
  const std::vector<uint64_t> strides = RowMajorStrides(local.shape);
  uint64_t part_begin = 0;
  uint64_t local_row = 0;
  for (const auto& part : widths) {
    const uint64_t first =
        part_begin + std::accumulate(part.begin(), part.begin() + rank, uint64_t{0});
    const uint64_t rows = first >= atom[dim] ? 0 : std::min(part[rank], atom[dim] - first);
    if (rows > 0) {
      Piece piece;
      piece.shape = atom;
      piece.shape[dim] = rows;
      piece.atom_begin.assign(atom.size(), 0);
      piece.atom_begin[dim] = first;
      piece.local_offset = local_row * strides[dim];
      piece.local_strides = strides;
      local.pieces.push_back(std::move(piece));
    }
    local_row += part[rank];
    part_begin += std::accumulate(part.begin(), part.end(), uint64_t{0});
  }
  return local;
}

Status ShardingRules::ChooseFamily(const SourceOptions& options,
                                   std::span<const std::string> names) {
  if (options.families == nullptr || names.empty()) return {};
  const FamilySet& families = *options.families;
  FamilyBelow chosen =
      families.ChooseBelow(names, options.family.empty() ? nullptr : families.Find(options.family));
  const size_t covered = chosen.covered;
  family_ = chosen.family;
  below_ = std::move(chosen.below);
  if (covered == names.size()) return {};
  if (!options.family.empty() && covered == 0) {
    const FamilyBelow best = families.ChooseBelow(names);
    return Fail(ErrorCode::kInvalid,
                StrCat("--family ", options.family, ": none of its rules matches any of the ",
                       names.size(), " parameters ('", names[0], "', ...)",
                       best.family == nullptr ? ""
                                              : StrCat("; family '", best.family->name(),
                                                       "' matches ", best.covered)));
  }
  if (family_ == nullptr) {
    Note(StrCat("no family matches any of the ", names.size(), " parameters ('", names[0],
                "', ...); views with tp or pp need one (--family FILE)"));
    return {};
  }
  std::string first;
  for (const std::string& name : names) {
    const std::string known = NameBelow(name, below_);
    if (first.empty() && family_->CountMatches({&known, 1}) == 0) first = name;
  }
  Note(StrCat("family '", family_->name(), "'", options.family.empty() ? " comes closest: it" : "",
              " has rules for ", covered, " of ", names.size(), " parameters",
              below_.empty() ? "" : StrCat(" (below '", below_, "')"), ", but none for '", first,
              names.size() - covered > 1 ? "', ..." : "'"));
  return {};
}

// From all that is told, else without what a config.json beside the checkpoint
// says, else from the user's numbers only: what contradicts the shapes is not used.
Status ShardingRules::DeriveSizes(std::span<const NamedLocals> given, const ModelSizes& sizes) {
  variables_ = sizes.All();
  if (family_ == nullptr) return {};
  std::vector<NamedLocals> inside;
  if (!below_.empty()) {
    inside.assign(given.begin(), given.end());
    for (auto& [name, locals] : inside) name = NameBelow(name, below_);
  }
  const std::span<const NamedLocals> parameters = below_.empty() ? given : inside;
  auto derived = family_->Derive(parameters, variables_);
  if (!derived && !sizes.configured.empty()) {
    Note(StrCat(sizes.config, ": not used: ", derived.error().message));
    derived = family_->Derive(parameters, ModelSizes{sizes.given, sizes.recorded, {}, ""}.All());
  }
  if (!derived && !sizes.recorded.empty()) {
    Note(StrCat("the sizes in the checkpoint's args are not used: ", derived.error().message));
    derived = family_->Derive(parameters, sizes.given);
  }
  if (!derived) return Fail(std::move(derived).error().WithContext("--family-set"));
  variables_ = *std::move(derived);
  return {};
}

Result<ShardingRules> ShardingRules::Make(const ShardingInfo* info, const SourceOptions& options,
                                          std::vector<NamedLocals> parameters,
                                          const ModelSizes& sizes) {
  ShardingRules rules;
  rules.info_ = info;
  if (!options.family.empty() &&
      (options.families == nullptr || options.families->Find(options.family) == nullptr)) {
    return Fail(ErrorCode::kNotFound, StrCat("--family ", options.family, ": no such family"));
  }
  std::vector<std::string> names;
  names.reserve(parameters.size());
  for (auto& [name, locals] : parameters) {
    names.push_back(name);
    if (info == nullptr || locals.size() == 1) continue;
    // The checkpoint's own word beats the family's rule.
    if (const AffineParameter* affine = info->affine.Find(name)) {
      locals.assign(1, affine->logical_shape);
    } else if (FirstMatch(info->replicated, name) != nullptr ||
               FirstMatch(info->averaged, name) != nullptr) {
      locals.resize(1);
    }
  }
  CKPT_RETURN_IF_ERROR(rules.ChooseFamily(options, names));
  CKPT_RETURN_IF_ERROR(rules.DeriveSizes(parameters, sizes));
  CKPT_ASSIGN_OR_RETURN(rules.replicated_, WholeNamePatterns(options.replicated, "--replicated"));
  CKPT_ASSIGN_OR_RETURN(rules.averaged_, WholeNamePatterns(options.averaged, "--averaged"));
  return rules;
}

void ShardingRules::Describe(StepModel& header) const {
  header.notes.insert(header.notes.end(), notes_.begin(), notes_.end());
  if (family_ == nullptr) return;
  header.family = family_->name();
  header.family_rules = family_->text();
  header.family_sizes = family_->Mentioned(variables_);
  const auto layers = variables_.find("layers");
  const bool known = layers != variables_.end() && layers->second > 0 && layers->second < (1 << 20);
  header.layers = known ? static_cast<uint32_t>(layers->second) : 0;
}

std::string ShardingRules::WhyOpen(std::string_view name) const {
  const auto match = family_ == nullptr
                         ? std::optional<RuleMatch>()
                         : family_->Match(name, variables_, below_).value_or(std::nullopt);
  if (!match || match->missing.empty()) return "no rule covers it";
  return StrCat("the rule ", match->rule, " needs ", match->missing, ", which nothing tells");
}

void ShardingRules::Note(std::string text) const {
  const bool known = std::find(notes_.begin(), notes_.end(), text) != notes_.end();
  if (!known && notes_.size() < 8) notes_.push_back(std::move(text));
}

Result<std::optional<RuleMatch>> ShardingRules::MatchFamily(std::string_view name,
                                                            size_t ranks) const {
  if (family_ == nullptr) return std::optional<RuleMatch>();
  auto match = family_->Match(name, variables_, below_);
  if (!match) {
    if (ranks > 1) return Fail(std::move(match).error().WithContext(StrCat("'", name, "'")));
    Note(StrCat("'", name, "': ", match.error().message, "; it cannot be cut"));
    return std::optional<RuleMatch>();
  }
  if (*match && !(*match)->missing.empty()) {
    Note(StrCat("nothing tells ", (*match)->missing, ", which rules of family '", family_->name(),
                "' need: until --family-set or a config.json beside the checkpoint tells it, "
                "no view cuts ",
                (*match)->only_unit ? "(finer than the source) " : "",
                "the parameters that need it"));
  }
  return match;
}

Status ShardingRules::DecideByInfo(std::string_view name, std::span<const Shape> locals,
                                   Decision& out) const {
  for (const auto& [pattern, reason] : info_->unsupported) {
    if (locals.size() > 1 && pattern.MatchesPrefix(name)) {
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("its engine recorded that its cut cannot be described: ", reason)}
                      .OfParameter(name));
    }
  }
  out.rule = "universal_checkpoint_info";
  if (FirstMatch(info_->replicated, name) != nullptr) {
    out.pattern = Pattern::Replicate();
  } else if (FirstMatch(info_->averaged, name) != nullptr) {
    out.pattern.kind = PatternKind::kPartial;
    out.pattern.cuts.clear();
  } else if (FirstMatch(info_->two_parts, name) != nullptr) {
    out.pattern = Pattern::Shard(0);
    out.part_count = 2;
  } else if (FirstMatch(info_->row, name) != nullptr) {
    out.pattern = Pattern::Shard(1);
  } else if (FirstMatch(info_->vocabulary, name) != nullptr) {
    out.pattern = Pattern::Shard(0);
    out.pattern.cuts[0].pad_multiple = 1;
    out.rows = info_->original_vocabulary;
  } else {
    for (const InfoSubParams& sub : info_->sub_params) {
      const NamePattern* pattern = FirstMatch(sub.patterns, name);
      if (pattern == nullptr) continue;
      out.pattern = Pattern::Shard(sub.dim, sub.sizes);
      out.part_count = sub.count;
      const auto widths = info_->widths.find(pattern->text());
      if (widths != info_->widths.end()) out.widths = widths->second;
      out.decided = true;
      return {};
    }
    return {};
  }
  out.decided = true;
  return {};
}

Result<std::optional<ShardingRules::Decision>> ShardingRules::DecideByFamily(
    std::string_view name, const RuleMatch& family, bool by_default) const {
  const Pattern& pattern = family.pattern;
  const bool one_cut = IsOneCut(pattern);
  if (by_default && !(one_cut && pattern.cuts[0].dim == 0)) {
    return RefuseParameter(
        name,
        "universal_checkpoint_info does not list it, which means a cut along dim "
        "0, but the rule ",
        family.rule,
        " says otherwise; settle it with "
        "--replicated or --averaged");
  }
  Decision out;
  out.pattern = pattern;
  out.rule = StrCat("the rule ", family.rule);
  if (one_cut && pattern.cuts[0].parts.size() == 1) {
    out.rows = pattern.cuts[0].parts[0];
    out.pattern.cuts[0].parts.clear();
  } else if (one_cut && pattern.cuts[0].pad_multiple > 0 && info_ != nullptr) {
    out.rows = info_->original_vocabulary;
  }
  return std::optional<Decision>(std::move(out));
}

Result<std::optional<ShardingRules::Decision>> ShardingRules::Decide(
    std::string_view name, std::span<const Shape> locals, const std::optional<RuleMatch>& family,
    bool by_default) const {
  Decision out;
  if (info_ != nullptr) {
    CKPT_RETURN_IF_ERROR(DecideByInfo(name, locals, out));
    const bool uncut = out.decided && out.pattern.kind == PatternKind::kReplicate;
    if (uncut && info_->autotp && family && IsOneCut(family->pattern)) {
      // Engines whose layers are cut by hand cut it as the family says.
      CKPT_ASSIGN_OR_RETURN(auto others, DecideByFamily(name, *family, false));
      others->whole_each = true;
      return others;
    }
    if (out.decided) {
      if (family) AdoptFamilyFacts(*family, out.pattern);
      return std::optional<Decision>(std::move(out));
    }
  }
  if (FirstMatch(replicated_, name) != nullptr) {
    out.pattern = Pattern::Replicate();
    out.rule = "--replicated";
    return std::optional<Decision>(std::move(out));
  }
  if (FirstMatch(averaged_, name) != nullptr) {
    out.pattern.kind = PatternKind::kPartial;
    out.rule = "--averaged";
    return std::optional<Decision>(std::move(out));
  }
  if (family && family->pattern.kind != PatternKind::kUnknown) {
    return DecideByFamily(name, *family, by_default);
  }
  if (!by_default) return std::optional<Decision>();
  out.pattern = Pattern::Shard(0);
  out.rule = "the default of universal_checkpoint_info";
  return std::optional<Decision>(std::move(out));
}

namespace {

Status ResolveGrid(std::string_view name, std::span<const Shape> locals, Sharding& out) {
  out.shape = locals[0];
  for (size_t i = 0; i < out.pattern.cuts.size(); ++i) {
    const uint32_t dim = out.pattern.cuts[i].dim;
    if (dim >= out.shape.size() || i >= out.pattern.grid.size()) {
      return RefuseParameter(name, "the rule's cuts do not fit ", ShapeToString(locals[0]));
    }
    CKPT_ASSIGN_OR_RETURN(out.shape[dim], CheckedMul(out.shape[dim], out.pattern.grid[i], "rows"));
  }
  for (size_t r = 0; r < locals.size(); ++r) {
    CKPT_ASSIGN_OR_RETURN(LocalTensor local, MakeLocal(out.pattern, out.shape, r, locals.size()));
    if (local.shape != locals[r])
      return RefuseParameter(name, "the rule contradicts rank ", r, "'s shape");
    out.locals.push_back(std::move(local));
  }
  return {};
}

// One cut at several ranks: the whole shape and what each rank holds.
Status ResolveCut(std::string_view name, std::span<const Shape> locals, uint64_t part_count,
                  std::vector<std::vector<uint64_t>> widths, std::optional<uint64_t> rows,
                  Sharding& out) {
  Cut& cut = out.pattern.cuts[0];
  CKPT_ASSIGN_OR_RETURN(const uint64_t total, TotalAlong(name, cut.dim, locals));
  if (part_count > 0) {
    if (total % part_count != 0) {
      return RefuseParameter(name, total, " rows are not ", part_count, " equal parts");
    }
    cut.parts.assign(part_count, total / part_count);
  }
  if (cut.parts.size() > 1) {
    const uint64_t sum = std::accumulate(cut.parts.begin(), cut.parts.end(), uint64_t{0});
    if (sum != total) {
      return RefuseParameter(name, "the parts have ", sum, " rows together, but the ranks hold ",
                             total);
    }
    if (widths.empty()) {
      CKPT_ASSIGN_OR_RETURN(widths, EvenWidths(name, cut.parts, locals.size()));
    }
  } else {
    cut.parts.clear();
    widths.assign(1, {});
    for (const Shape& local : locals) widths[0].push_back(local[cut.dim]);
  }
  const std::vector<uint64_t> parts = cut.parts.empty() ? std::vector{total} : cut.parts;
  CKPT_RETURN_IF_ERROR(CheckWidths(name, cut.dim, locals, parts, widths));
  if (rows && *rows > total) {
    return RefuseParameter(name, "the unpadded ", *rows, " rows are more than the ranks' ", total);
  }
  out.shape = locals[0];
  out.shape[cut.dim] = rows.value_or(total);
  if (out.shape[cut.dim] < total && cut.pad_multiple == 0) cut.pad_multiple = 1;
  CKPT_RETURN_IF_ERROR(ElementCount(out.shape));
  for (uint32_t r = 0; r < locals.size(); ++r) {
    out.locals.push_back(LocalOfWidths(out.shape, cut.dim, widths, r));
  }
  return {};
}

}  // namespace

Status ShardingRules::ResolveAffine(std::string_view name, std::span<const Shape> locals,
                                    const AffineParameter& affine, Sharding& out) {
  if (affine.ranks.size() != locals.size()) {
    return RefuseParameter(name, "affine_map describes ", affine.ranks.size(),
                           " ranks, but there "
                           "are ",
                           locals.size());
  }
  for (size_t r = 0; r < locals.size(); ++r) {
    if (affine.ranks[r].shape != locals[r]) {
      return RefuseParameter(name, "affine_map says rank ", r, " holds ",
                             ShapeToString(affine.ranks[r].shape), ", but its tensor is ",
                             ShapeToString(locals[r]));
    }
    for (const Piece& piece : affine.ranks[r].pieces) {
      if (piece.scale == 1.0) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "affine_map scales its shards, which ckptfs does "
                        "not understand"}
                      .OfParameter(name));
    }
  }
  out.shape = affine.logical_shape;
  out.locals = affine.ranks;
  out.how = affine.replicated ? Sharding::How::kReplicas : Sharding::How::kCut;
  return {};
}

// Held by one rank: only the pattern for other degrees is in question.
Status ShardingRules::ResolveWhole(std::string_view name, const Decision* decision,
                                   Sharding& out) const {
  if (decision != nullptr && decision->part_count > 0) {
    Cut& cut = out.pattern.cuts[0];
    if (cut.dim < out.shape.size() && out.shape[cut.dim] % decision->part_count == 0) {
      cut.parts.assign(decision->part_count, out.shape[cut.dim] / decision->part_count);
    }
  }
  if (auto fits = MakeLocal(out.pattern, out.shape, 0, 1); !fits) {
    Note(StrCat("'", name, "': ", decision->rule, " contradicts its shape ",
                ShapeToString(out.shape), " (", fits.error().message, "); it cannot be cut"));
    out.pattern = Pattern{};
  }
  out.locals.push_back(WholeTensor(out.shape));
  return {};
}

Status ShardingRules::ResolveShards(std::string_view name, std::span<const Shape> locals,
                                    Decision decision, Sharding& out) {
  if (out.pattern.kind == PatternKind::kShard && !decision.whole_each) {
    out.how = Sharding::How::kCut;
    return out.pattern.cuts.size() > 1 ? ResolveGrid(name, locals, out)
                                       : ResolveCut(name, locals, decision.part_count,
                                                    std::move(decision.widths), decision.rows, out);
  }
  if (out.pattern.kind == PatternKind::kUnique || out.pattern.bias_scaled) {
    return Fail(
        Error{ErrorCode::kUnsupported, StrCat(decision.rule, " cannot be read from several ranks")}
            .OfParameter(name));
  }
  out.how = out.pattern.kind == PatternKind::kPartial ? Sharding::How::kAverage
                                                      : Sharding::How::kReplicas;
  CKPT_RETURN_IF_ERROR(CheckSameShapes(name, locals));
  out.shape = locals[0];
  out.locals.assign(locals.size(), WholeTensor(out.shape));
  return {};
}

namespace {

// A unit that nobody knows: every run of rows that the source kept together is a
// multiple of it, so what divides all of those is safe to take for it.
void SettleUnits(Sharding& sharding) {
  for (Cut& cut : sharding.pattern.cuts) {
    if (cut.unit > 0) continue;
    for (const uint64_t part : cut.parts) cut.unit = std::gcd(cut.unit, part);
    for (const LocalTensor& local : sharding.locals) {
      for (const Piece& piece : local.pieces) {
        if (cut.dim < piece.shape.size()) cut.unit = std::gcd(cut.unit, piece.shape[cut.dim]);
      }
    }
    cut.unit = std::max<uint64_t>(cut.unit, 1);
  }
}

}  // namespace

Result<std::optional<Sharding>> ShardingRules::Resolve(std::string_view name,
                                                       std::span<const Shape> locals,
                                                       bool buffer) const {
  CKPT_CHECK(!locals.empty());
  CKPT_ASSIGN_OR_RETURN(const auto family, MatchFamily(name, locals.size()));
  const AffineParameter* affine = info_ != nullptr ? info_->affine.Find(name) : nullptr;
  const bool by_default = !buffer && locals.size() > 1 && affine == nullptr && info_ != nullptr &&
                          (info_->DeclaresTensorParallel() || info_->lists);
  CKPT_ASSIGN_OR_RETURN(auto decision, Decide(name, locals, family, by_default));
  if (!decision && affine == nullptr && locals.size() > 1) return std::optional<Sharding>();
  Sharding out;
  out.shape = locals[0];
  if (decision) out.pattern = decision->pattern;
  if (family) {
    out.stage = family->stage;
    out.layer = family->layer;
    out.expert = family->expert;
    out.expert_at = family->expert_at;
    out.stacked_experts = family->stacked_experts;
  }
  out.on_several_stages =
      info_ != nullptr && FirstMatch(info_->pipeline_replicated, name) != nullptr;
  const bool ruled = family && IsOneCut(family->pattern) && IsOneCut(out.pattern) &&
                     family->pattern.cuts[0].dim == out.pattern.cuts[0].dim;
  if (locals.size() == 1) {
    CKPT_RETURN_IF_ERROR(ResolveWhole(name, decision ? &*decision : nullptr, out));
    SettleUnits(out);
    // Put together again (a universal directory), and the map is still there.
    if (affine != nullptr && affine->ranks.size() > 1 && affine->logical_shape == out.shape) {
      out.pattern = SettlePatterns(out.pattern, ruled, out.shape, affine->ranks).pattern;
    }
    return std::optional<Sharding>(std::move(out));
  }
  if (affine != nullptr) {
    CKPT_RETURN_IF_ERROR(ResolveAffine(name, locals, *affine, out));
  } else {
    CKPT_RETURN_IF_ERROR(ResolveShards(name, locals, *std::move(decision), out));
  }
  SettleUnits(out);
  SourcePatterns settled = SettlePatterns(out.pattern, ruled, out.shape, out.locals);
  out.pattern = std::move(settled.pattern);
  out.source_pattern = std::move(settled.source);
  return std::optional<Sharding>(std::move(out));
}

}  // namespace ckptfs
