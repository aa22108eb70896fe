// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/peer/survival.h"
#include "mount/commands/command_set.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr uint32_t kMostNodes = 1 << 17;
// 419 interruptions of 2,048 nodes in 54 days (Llama 3.1).
constexpr std::string_view kNodeMtbf = "263.94";
constexpr std::string_view kWindow = "15";
const std::vector<std::string> kSchemes = {"off",    "local",  "copy",  "copy:2",
                                           "ec:4+1", "ec:4+2", "ec:8+2"};

struct ProtectFlags {
  bool plan = false;
  unsigned nodes = 0;
  unsigned failure_domain = 1;
  std::vector<std::string> schemes;
  unsigned dead = 4;
  std::string mtbf;
  std::string domain_mtbf;
  std::string window;
  std::string part;
  bool json = false;
};

Result<double> ParseTime(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool number = !text.empty() && (IsDigit(text[0]) || text[0] == '.') && *end == '\0';
  if (number && value > 0 && std::isfinite(value)) return value;
  return Refuse("'", text, "' is not a number above 0, such as 0.5");
}

Result<uint32_t> ParseNodes(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const uint32_t nodes, ParsePositive(text));
  if (nodes > kMostNodes) return Refuse("at most ", kMostNodes, " nodes are planned for");
  return nodes;
}

Result<uint32_t> ParseDead(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const uint32_t dead, ParsePositive(text));
  if (dead > kMostDead) return Refuse("at most ", kMostDead, " dead nodes are counted");
  return dead;
}

// One line of the plan: a scheme, and how it fares or why it cannot be.
struct PlanRow {
  ProtectScheme scheme;
  Result<Survival> survival;
};

struct ProtectionPlan {
  FailureRates rates;
  std::optional<uint64_t> part_bytes;
  std::vector<PlanRow> rows;
};

std::vector<PeerNode> NodesOf(const ProtectFlags& options) {
  std::vector<PeerNode> nodes;
  for (unsigned i = 0; i < options.nodes; ++i) {
    const bool alone = options.failure_domain <= 1;
    nodes.push_back({StrCat("node", i), alone ? "" : StrCat("domain", i / options.failure_domain)});
  }
  return nodes;
}

Result<ProtectionPlan> MakePlan(const ProtectFlags& options) {
  const auto given = [](const std::string& text, std::string_view otherwise) {
    return ParseTime(text.empty() ? std::string(otherwise) : text);
  };
  ProtectionPlan plan;
  CKPT_ASSIGN_OR_RETURN(plan.rates.node_mtbf_days, given(options.mtbf, kNodeMtbf));
  CKPT_ASSIGN_OR_RETURN(plan.rates.window_minutes, given(options.window, kWindow));
  if (!options.domain_mtbf.empty()) {
    CKPT_ASSIGN_OR_RETURN(plan.rates.domain_mtbf_days, ParseTime(options.domain_mtbf));
  }
  if (!options.part.empty()) {
    CKPT_ASSIGN_OR_RETURN(plan.part_bytes, ParseBytes(options.part));
  }
  const std::vector<PeerNode> nodes = NodesOf(options);
  for (const std::string& text : options.schemes.empty() ? kSchemes : options.schemes) {
    CKPT_ASSIGN_OR_RETURN(const ProtectScheme scheme, ProtectScheme::Parse(text));
    plan.rows.push_back({scheme, SurvivalOf(nodes, scheme, plan.rates, options.dead)});
  }
  return plan;
}

// Bytes of `parts` parts; null without their size.
Json BytesJson(const ProtectionPlan& plan, double parts) {
  if (!plan.part_bytes) return nullptr;
  return static_cast<uint64_t>(std::llround(parts * static_cast<double>(*plan.part_bytes)));
}

Json RowJson(const ProtectionPlan& plan, const PlanRow& row) {
  Json json = {{"scheme", row.scheme.Text()}, {"error", nullptr}};
  if (!row.survival) {
    json["error"] = ErrorJson(row.survival.error());
    return json;
  }
  const Survival& survival = *row.survival;
  json["groups"] = survival.groups;
  json["group_sizes"] = {survival.smallest_group, survival.largest_group};
  json["extra_memory"] = survival.extra_memory;
  json["largest_extra_memory"] = survival.largest_extra_memory;
  json["extra_memory_bytes"] = BytesJson(plan, survival.extra_memory);
  json["sent"] = survival.sent;
  json["sent_bytes"] = BytesJson(plan, survival.sent);
  json["lost_by_nodes"] = survival.lost_by_nodes;
  json["lost_by_domains"] = survival.lost_by_domains;
  json["loads_a_year"] = survival.loads_a_year;
  return json;
}

Json PlanJson(const ProtectionPlan& plan, const ProtectFlags& options) {
  Json rows = Json::array();
  for (const PlanRow& row : plan.rows) rows.push_back(RowJson(plan, row));
  Json json = {{"nodes", options.nodes},
               {"failure_domain", std::max(options.failure_domain, 1u)},
               {"mtbf_days", plan.rates.node_mtbf_days},
               {"domain_mtbf_days", nullptr},
               {"window_minutes", plan.rates.window_minutes},
               {"part_bytes", nullptr},
               {"schemes", std::move(rows)}};
  if (plan.rates.domain_mtbf_days) json["domain_mtbf_days"] = *plan.rates.domain_mtbf_days;
  if (plan.part_bytes) json["part_bytes"] = *plan.part_bytes;
  return json;
}

// "1" and "0" mean always and never; what only rounds to them has a mark.
std::string KeptText(double lost) {
  if (lost <= 0) return "1";
  if (lost >= 1) return "0";
  if (lost < 0.00005) return "~1";
  if (lost > 0.99995) return "~0";
  return fmt::format("{:.4f}", 1 - lost);
}

std::string LoadsText(double loads) {
  if (loads >= 10) return fmt::format("{:.0f}", loads);
  if (loads >= 0.01) return fmt::format("{:.2f}", loads);
  return loads == 0 ? "0" : fmt::format("{:.1g}", loads);
}

std::string PartsText(const ProtectionPlan& plan, double parts) {
  const Json bytes = BytesJson(plan, parts);
  return bytes.is_null() ? fmt::format("{:.2f}", parts) : HumanBytes(bytes.get<uint64_t>());
}

std::vector<std::string> RowText(const ProtectionPlan& plan, const PlanRow& row, size_t dead,
                                 size_t domains) {
  std::vector<std::string> cells = {row.scheme.Text()};
  const auto add = [&](const std::vector<double>& lost, size_t until) {
    for (size_t f = 1; f <= until; ++f) cells.push_back(f < lost.size() ? KeptText(lost[f]) : "-");
  };
  if (!row.survival) {
    cells.resize(4 + dead + domains, "-");
    return cells;
  }
  const Survival& survival = *row.survival;
  cells.push_back(PartsText(plan, survival.extra_memory));
  cells.push_back(PartsText(plan, survival.sent));
  add(survival.lost_by_nodes, dead);
  add(survival.lost_by_domains, domains);
  cells.push_back(LoadsText(survival.loads_a_year));
  return cells;
}

// Explains what the columns do not say.
void PrintRemarks(const ProtectionPlan& plan, const ProtectFlags& options) {
  fmt::print("\nMEMORY and SENT are of a node, {}.\n",
             plan.part_bytes ? "of whose step " + HumanBytes(*plan.part_bytes) + " are its own part"
                             : "in multiples of its own part of a step");
  fmt::print("nD: how likely all parts are kept when n nodes die{}.\n",
             options.failure_domain > 1 ? "; nF: when n failure domains do" : "");
  fmt::print(
      "LOADS: steps a year that must come from the store; a node fails every {:g} days, "
      "and is unprotected for {:g} min.\n",
      plan.rates.node_mtbf_days, plan.rates.window_minutes);
  if (plan.rates.domain_mtbf_days)
    fmt::print("A failure domain fails every {:g} days.\n", *plan.rates.domain_mtbf_days);
  for (const PlanRow& row : plan.rows) {
    if (row.scheme.kind == ProtectScheme::kLocal)
      fmt::print("local: only of state that the other node of a pair holds on its device, too.\n");
    if (!row.survival)
      fmt::print("{}: {}\n", row.scheme.Text(), Printable(row.survival.error().message));
  }
}

void PrintPlan(const ProtectionPlan& plan, const ProtectFlags& options) {
  const size_t dead = options.dead, domains = options.failure_domain > 1 ? 2 : 0;
  std::vector<std::string> heading = {"SCHEME", "MEMORY", "SENT"};
  for (size_t f = 1; f <= dead; ++f) heading.push_back(StrCat(f, "D"));
  for (size_t d = 1; d <= domains; ++d) heading.push_back(StrCat(d, "F"));
  heading.emplace_back("LOADS");
  std::vector<std::vector<std::string>> rows = {std::move(heading)};
  for (const PlanRow& row : plan.rows) rows.push_back(RowText(plan, row, dead, domains));
  PrintColumns(rows, "l" + std::string(3 + dead + domains, 'r'));
  PrintRemarks(plan, options);
}

Status RunProtect(const ProtectFlags& options) {
  if (!options.plan) return RefuseUsage("`protect` only plans: give --plan and --nodes N");
  if (options.nodes == 0) return RefuseUsage("--plan needs --nodes N");
  CKPT_ASSIGN_OR_RETURN(const ProtectionPlan plan, MakePlan(options));
  if (options.json) {
    PrintJson(PlanJson(plan, options));
  } else {
    PrintPlan(plan, options);
  }
  return {};
}

}  // namespace

void AddProtectCommand(CommandSet& commands) {
  auto options = std::make_shared<ProtectFlags>();
  Command& command =
      commands.Add("protect", "How steps in memory fare when nodes die, by scheme of protection");
  command.Add("--plan", options->plan, "Calculate; nothing is read or sent");
  command.Add("--nodes", options->nodes, "Nodes of the job").Value("N").Check(Checked(ParseNodes));
  command.Add("--failure-domain", options->failure_domain, "Nodes that die together (a rack)")
      .Value("SIZE")
      .Check(Checked(ParseNodes));
  command
      .Add("--scheme", options->schemes, "Only this: off, local, copy, copy:COPIES, ec:DATA+PARITY")
      .Value("SCHEME")
      .Check(Checked(ProtectScheme::Parse));
  command.Add("--dead", options->dead, "Up to how many dead nodes are counted (default: 4)")
      .Value("N")
      .Check(Checked(ParseDead));
  command
      .Add("--mtbf", options->mtbf,
           StrCat("Mean time between a node's failures (default: ", kNodeMtbf, ")"))
      .Value("DAYS")
      .Check(Checked(ParseTime));
  command
      .Add("--domain-mtbf", options->domain_mtbf,
           "The same of a whole failure domain (default: it never fails)")
      .Value("DAYS")
      .Check(Checked(ParseTime));
  command
      .Add("--window", options->window,
           StrCat("How long a death leaves parts unprotected (default: ", kWindow, ")"))
      .Value("MINUTES")
      .Check(Checked(ParseTime));
  command
      .Add("--part", options->part,
           "A node's own part of a step, to say memory and traffic in bytes")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  AddJsonOption(command, options->json);
  command.body = [options] { return RunProtect(*options); };
}

}  // namespace ckptfs
