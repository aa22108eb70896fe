// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/redundancy_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr size_t kFilesPrinted = 64;
constexpr size_t kGroupsPrinted = 20;
constexpr size_t kNamesPrinted = 4;

std::string TensorLabel(const StepModel& step, AtomIndex index) {
  const Atom& atom = step.atom(index);
  return StrCat(step.parameter(atom.parameter).name, " (", atom.kind, ")");
}

Json TensorNameJson(const StepModel& step, AtomIndex index) {
  const Atom& atom = step.atom(index);
  return {{"name", step.parameter(atom.parameter).name},
          {"kind", atom.kind},
          {"optimizer", atom.optimizer}};
}

Json SharingJson(const BySharing& numbers) {
  Json json = Json::object();
  for (const Sharing sharing : {Sharing::kFull, Sharing::kPartial, Sharing::kNone})
    json[std::string(SharingName(sharing))] = numbers[static_cast<size_t>(sharing)];
  return json;
}

std::string PathOfFile(const StepModel& step, const FileRedundancy& file) {
  return step.PathOf(step.blob(file.blob));
}

Json ClassesJson(const RedundancyReport& report) {
  Json classes = Json::array();
  for (const ClassRedundancy& one : report.classes) {
    classes.push_back({{"class", one.name},
                       {"files", one.files},
                       {"stored", one.stored},
                       {"unique", one.unique},
                       {"redundant", one.stored - one.unique},
                       {"differing", one.differing},
                       {"tensors", SharingJson(one.tensors)},
                       {"bytes", SharingJson(one.bytes)}});
  }
  return classes;
}

Json TensorsJson(const StepModel& step, const RedundancyReport& report) {
  Json tensors = Json::array();
  for (const TensorRedundancy& tensor : report.tensors) {
    Json json = TensorNameJson(step, tensor.atom);
    json["sharing"] = std::string(SharingName(tensor.sharing));
    json["stored"] = tensor.stored;
    json["unique"] = tensor.unique;
    json["differing"] = tensor.differing;
    json["holders"] = {tensor.fewest_holders, tensor.most_holders};
    json["keeps"] = Json::array();
    for (const KeptPart& kept : tensor.keeps)
      json["keeps"].push_back({{"file", kept.file}, {"bytes", kept.bytes}});
    tensors.push_back(std::move(json));
  }
  return tensors;
}

Json EqualJson(const StepModel& step, const RedundancyReport& report) {
  Json groups = Json::array();
  for (const EqualBytes& group : report.equal) {
    Json tensors = Json::array();
    for (const AtomIndex atom : group.atoms) tensors.push_back(TensorNameJson(step, atom));
    groups.push_back(
        {{"bytes", group.bytes}, {"constant", group.constant}, {"tensors", std::move(tensors)}});
  }
  return groups;
}

std::vector<std::string> ClassRow(const std::string& name, const std::string& files,
                                  uint64_t stored, uint64_t unique, const BySharing& tensors) {
  const auto count = [&](Sharing sharing) {
    return std::to_string(tensors[static_cast<size_t>(sharing)]);
  };
  return {name,
          files,
          HumanBytes(stored),
          HumanBytes(unique),
          HumanBytes(stored - unique),
          fmt::format("{:.1f} %", stored == 0 ? 0.0
                                              : 100.0 * static_cast<double>(stored - unique) /
                                                    static_cast<double>(stored)),
          count(Sharing::kFull),
          count(Sharing::kPartial),
          count(Sharing::kNone)};
}

void PrintClasses(const RedundancyReport& report) {
  std::vector<std::vector<std::string>> rows = {
      {"CLASS", "FILES", "STORED", "UNIQUE", "REDUNDANT", "", "FULL", "PARTIAL", "NONE"}};
  ClassRedundancy all;
  for (const ClassRedundancy& one : report.classes) {
    rows.push_back(ClassRow(Printable(one.name), std::to_string(one.files), one.stored, one.unique,
                            one.tensors));
    all.stored += one.stored;
    all.unique += one.unique;
    all.differing += one.differing;
    for (size_t s = 0; s < kSharings; ++s) all.tensors[s] += one.tensors[s];
  }
  rows.push_back(ClassRow("all", "", all.stored, all.unique, all.tensors));
  PrintColumns(rows, "lrrrrrrrr");
  if (all.differing > 0)
    fmt::print(
        "note: {} are copies that the format calls equal, or averages, and are not: they count as "
        "unique\n",
        HumanBytes(all.differing));
}

void PrintFiles(const StepModel& step, const RedundancyReport& report) {
  std::vector<std::vector<std::string>> rows = {{"SIZE", "STORED", "SHARED", "KEEPS", "FILE"}};
  for (const FileRedundancy& file : report.files) {
    if (rows.size() > kFilesPrinted) break;
    rows.push_back({HumanBytes(step.blob(file.blob).stamp.size), HumanBytes(file.stored),
                    HumanBytes(file.shared), HumanBytes(file.kept),
                    Printable(PathOfFile(step, file))});
  }
  fmt::print("\n");
  PrintColumns(rows, "rrrrl");
  if (report.files.size() > kFilesPrinted)
    fmt::print("... and {} more\n", Counted(report.files.size() - kFilesPrinted, "file"));
}

void PrintEqual(const StepModel& step, const RedundancyReport& report) {
  if (report.equal.empty()) return;
  fmt::print("\nEqual bytes of other tensors, from which nothing follows:\n");
  for (size_t g = 0; g < report.equal.size() && g < kGroupsPrinted; ++g) {
    const EqualBytes& group = report.equal[g];
    std::string names;
    for (size_t i = 0; i < group.atoms.size() && i < kNamesPrinted; ++i)
      names += StrCat(i == 0 ? "" : ", ", Printable(TensorLabel(step, group.atoms[i])));
    if (group.atoms.size() > kNamesPrinted) names += ", ...";
    fmt::print("{} of {}{}: {}\n", Counted(group.atoms.size(), "tensor"), HumanBytes(group.bytes),
               group.constant ? ", each element the same" : "", names);
  }
  if (report.equal.size() > kGroupsPrinted)
    fmt::print("... and {} more\n", Counted(report.equal.size() - kGroupsPrinted, "group"));
}

void PrintTensors(const StepModel& step, const RedundancyReport& report) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "KIND", "SHARING", "HOLDERS", "STORED", "UNIQUE"}};
  for (const TensorRedundancy& tensor : report.tensors) {
    const Atom& atom = step.atom(tensor.atom);
    const bool same = tensor.fewest_holders == tensor.most_holders;
    rows.push_back({Printable(step.parameter(atom.parameter).name), Printable(atom.kind),
                    std::string(SharingName(tensor.sharing)),
                    same ? StrCat(tensor.fewest_holders)
                         : StrCat(tensor.fewest_holders, "-", tensor.most_holders),
                    HumanBytes(tensor.stored), HumanBytes(tensor.unique)});
  }
  fmt::print("\n");
  PrintColumns(rows, "lllrrr");
}

Json TensorsSinceJson(const StepModel& step, const StepSince& since) {
  Json tensors = Json::array();
  for (const TensorSince& tensor : since.tensors) {
    Json json = TensorNameJson(step, tensor.atom);
    json["since"] = std::string(SinceBeforeName(tensor.since));
    json["bytes"] = tensor.bytes;
    json["unchanged"] = tensor.unchanged;
    json["shared"] = tensor.shared;
    tensors.push_back(std::move(json));
  }
  return tensors;
}

Json ClassSinceJson(const ClassSince& one) {
  Json tensors = Json::object();
  for (size_t s = 0; s < kSinceBefores; ++s)
    tensors[std::string(SinceBeforeName(static_cast<SinceBefore>(s)))] = one.tensors[s];
  return {{"class", one.name},
          {"bytes", one.bytes},
          {"unchanged", one.unchanged},
          {"shared", one.shared},
          {"tensors", std::move(tensors)}};
}

std::string ShareText(uint64_t part, uint64_t whole) {
  return fmt::format(
      "{:.1f} %",
      whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

Json RedundancyJson(const StepModel& step, const RedundancyReport& report) {
  Json files = Json::array();
  for (const FileRedundancy& file : report.files) {
    files.push_back({{"path", PathOfFile(step, file)},
                     {"size", step.blob(file.blob).stamp.size},
                     {"stored", file.stored},
                     {"shared", file.shared},
                     {"keeps", file.kept}});
  }
  Json pairs = nullptr;
  if (report.pairs) {
    pairs = Json::array();
    for (const SharedPair& pair : *report.pairs)
      pairs.push_back({{"a", pair.a}, {"b", pair.b}, {"bytes", pair.bytes}});
  }
  return {{"classes", ClassesJson(report)},
          {"tensors", TensorsJson(step, report)},
          {"files", std::move(files)},
          {"pairs", std::move(pairs)},
          {"equal_bytes", EqualJson(step, report)},
          {"bytes_read", report.bytes_read}};
}

void PrintRedundancy(const StepModel& step, const RedundancyReport& report, bool tensors) {
  PrintClasses(report);
  if (tensors) PrintTensors(step, report);
  PrintFiles(step, report);
  PrintEqual(step, report);
}

Json UnchangedJson(const std::vector<ChainStep>& steps, const std::vector<StepSince>& since) {
  Json pairs = Json::array();
  for (size_t i = 0; i < since.size(); ++i) {
    Json classes = Json::array();
    for (const ClassSince& one : since[i].classes) classes.push_back(ClassSinceJson(one));
    pairs.push_back({{"before", steps[i].name},
                     {"step", steps[i + 1].name},
                     {"classes", std::move(classes)},
                     {"tensors", TensorsSinceJson(*steps[i + 1].model, since[i])},
                     {"bytes_read", since[i].bytes_read}});
  }
  return {{"across", std::move(pairs)}};
}

void PrintUnchanged(const std::vector<ChainStep>& steps, const std::vector<StepSince>& since,
                    bool tensors) {
  for (size_t i = 0; i < since.size(); ++i) {
    fmt::print("{}{} since {}\n", i == 0 ? "" : "\n", Printable(steps[i + 1].name),
               Printable(steps[i].name));
    std::vector<std::vector<std::string>> rows = {{"CLASS", "BYTES", "UNCHANGED", "", "STORED ONCE",
                                                   "UNCHANGED", "PARTLY", "CHANGED", "FRESH"}};
    for (const ClassSince& one : since[i].classes) {
      rows.push_back({Printable(one.name), HumanBytes(one.bytes), HumanBytes(one.unchanged),
                      ShareText(one.unchanged, one.bytes), HumanBytes(one.shared)});
      for (const uint64_t count : one.tensors) rows.back().push_back(std::to_string(count));
    }
    PrintColumns(rows, "lrrrrrrrr");
    if (!tensors) continue;
    std::vector<std::vector<std::string>> lines = {{"NAME", "KIND", "SINCE", "BYTES", "UNCHANGED"}};
    for (const TensorSince& tensor : since[i].tensors) {
      const Atom& atom = steps[i + 1].model->atom(tensor.atom);
      lines.push_back({Printable(steps[i + 1].model->parameter(atom.parameter).name),
                       Printable(atom.kind), std::string(SinceBeforeName(tensor.since)),
                       HumanBytes(tensor.bytes), HumanBytes(tensor.unchanged)});
    }
    fmt::print("\n");
    PrintColumns(lines, "lllrr");
  }
}

}  // namespace ckptfs
