// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/shown_names.h"

#include <algorithm>
#include <unordered_map>

#include "core/base/strings.h"
#include "core/model/family.h"

namespace ckptfs {
namespace {

ShownNames Canonical(const StepModel& step) {
  ShownNames names;
  names.parameters.reserve(step.parameters.size());
  for (const Parameter& parameter : step.parameters) names.parameters.push_back(parameter.name);
  for (const Alias& alias : step.aliases) names.aliases.push_back(alias.name);
  return names;
}

bool IsTied(const StepModel& step) {
  return !step.aliases.empty() ||
         std::any_of(step.parameters.begin(), step.parameters.end(),
                     [](const Parameter& p) { return p.name.starts_with("tied_modules."); });
}

Result<ShownNames> Rename(const StepModel& step, Naming to, const Family& family) {
  const bool tied = IsTied(step);
  const uint32_t layers = step.LayerCount();
  ShownNames names;
  std::unordered_map<std::string, size_t> taken;
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    if (!IsOfModel(step.parameters[i])) {
      names.parameters.push_back(step.parameters[i].name);
      continue;
    }
    auto shown = family.Rename(step.parameters[i].name, to, layers, tied);
    if (!shown) {
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("family '", family.name(), "' has no rename rule for it to the ",
                               to == Naming::kPipe ? "pipe" : "plain", " module structure")}
                      .OfParameter(step.parameters[i].name));
    }
    auto [other, inserted] = taken.emplace(*shown, i);
    if (!inserted) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("parameters '", step.parameters[other->second].name, "' and '",
                         step.parameters[i].name, "' would both be named '", *shown, "'"));
    }
    names.parameters.push_back(*std::move(shown));
  }
  for (const Alias& alias : step.aliases) {
    auto shown = family.Rename(alias.name, to, layers, tied);
    const bool own = shown && !taken.contains(*shown);
    names.aliases.push_back(own ? *std::move(shown) : std::string());
  }
  return names;
}

}  // namespace

Result<ShownNames> NamesFor(const StepModel& step, const Layout& layout) {
  if (layout.naming == Naming::kAsSource || layout.naming == step.layout.naming) {
    return Canonical(step);
  }
  const std::string token = layout.naming == Naming::kPipe ? "pipe" : "plain";
  if (step.family.empty()) {
    return Fail(Error{ErrorCode::kUnsupported,
                      StrCat("naming '", token,
                             "' needs a family with rename rules, and the step was "
                             "adopted with none")}
                    .Needing("adopt with --family NAME or FILE"));
  }
  if (step.family_rules.empty()) {
    return Fail(
        Error{ErrorCode::kUnsupported, StrCat("naming '", token,
                                              "': the step was adopted before the rules of its "
                                              "family '",
                                              step.family, "' were kept with it")}
            .Needing("adopt it again"));
  }
  CKPT_ASSIGN_OR_RETURN(const Family family, Family::Parse(step.family_rules, step.family));
  return Rename(step, layout.naming, family);
}

}  // namespace ckptfs
