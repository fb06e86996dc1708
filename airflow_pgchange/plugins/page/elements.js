// Elements for the shell of Airflow 3.1, which shares React with plugins but not Chakra. They have the names and arguments of the
// Chakra components that the page uses. Their colours are the shell's variables.
const { React, ReactDOM } = globalThis;
const { Fragment, cloneElement, createContext, createElement: h, forwardRef, useContext, useEffect, useId, useRef, useState } = React;

const space = (value) => (typeof value === "number" ? `${value / 4}rem` : value);
const colour = (value) => (value === "transparent" ? value : `var(--chakra-colors-${value.replace(".", "-")})`);
const oneOf = (values) => (value) => values[value] ?? value;
const SIZES = oneOf({ xs: "0.75rem", sm: "0.875rem", md: "1rem", lg: "1.125rem", xl: "1.25rem" });
const WEIGHTS = oneOf({ normal: 400, medium: 500, semibold: 600 });
const RADII = oneOf({ sm: "0.25rem", md: "0.375rem" });
const CLAMPED = "display: -webkit-box; -webkit-box-orient: vertical; overflow: hidden; -webkit-line-clamp:";

// Arguments of Chakra that are not properties of CSS, or whose values are names: the property, and a function for its value.
const NAMED = {
  bg: ["background-color", colour],
  borderColor: ["border-color", colour],
  borderRadius: ["border-radius", RADII],
  color: ["color", colour],
  columnGap: ["column-gap", space],
  fontSize: ["font-size", SIZES],
  fontWeight: ["font-weight", WEIGHTS],
  gap: ["gap", space],
  h: ["height", space],
  maxH: ["max-height", space],
  maxW: ["max-width", space],
  mb: ["margin-bottom", space],
  minW: ["min-width", space],
  mt: ["margin-top", space],
  my: ["margin-block", space],
  p: ["padding", space],
  px: ["padding-inline", space],
  py: ["padding-block", space],
  rowGap: ["row-gap", space],
  w: ["width", space],
};
// Properties of CSS that are passed unchanged.
const PLAIN = new Set(
  "alignItems borderBottomWidth borderWidth boxShadow cursor display flex flexShrink flexWrap fontVariantNumeric height overflow overflowWrap overflowX overflowY position right textAlign textDecoration verticalAlign whiteSpace width zIndex".split(" "),
);

const isStyle = (name) => name in NAMED || PLAIN.has(name) || ["css", "lineClamp", "truncate"].includes(name);

const declared = (styles) =>
  Object.entries(styles)
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => {
      if (name === "css") return declared(value);
      if (name === "lineClamp") return `${CLAMPED} ${value};`;
      if (name === "truncate") return "overflow: hidden; text-overflow: ellipsis; white-space: nowrap;";
      if (/^[&@]/.test(name)) return `${name} { ${declared(value)} }`;
      const [property, made] = NAMED[name] ?? [name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`), String];
      return `${property}: ${made(value)};`;
    })
    .join(" ");

// Each set of styles is a class of a style sheet: a style attribute can have neither media queries nor selectors.
const sheet = new CSSStyleSheet();
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
const classes = new Map();

const classOf = (styles) => {
  const text = declared(styles);
  if (text && !classes.has(text)) {
    classes.set(text, `pgchange-${classes.size}`);
    sheet.insertRule(`.${classes.get(text)} { ${text} }`, sheet.cssRules.length);
  }
  return classes.get(text);
};

// An element with a style. asChild: the only child gets the style, and no element is created.
const element = (tag, own = () => ({})) =>
  forwardRef(({ as, asChild, size, variant, colorPalette, children, ...given }, ref) => {
    const entries = Object.entries(given);
    const styles = { ...own({ size, variant, colorPalette }), ...Object.fromEntries(entries.filter(([name]) => isStyle(name))) };
    const rest = { ...Object.fromEntries(entries.filter(([name]) => !isStyle(name))), className: classOf(styles), ref };
    return asChild ? cloneElement(children, rest) : h(as ?? tag, rest, children);
  });

const FIELD = { borderWidth: "1px", borderRadius: "md", bg: "bg", color: "fg" };
const CONTROL = ({ size }) => ({ ...FIELD, px: 3, py: size === "sm" ? 1.5 : 2, fontSize: "sm", width: "100%" });
const FLOATING = { ...FIELD, css: { boxShadow: "0 4px 12px rgb(0 0 0 / 25%)" } };

const BUTTON = ({ size, variant = "solid", colorPalette = "gray" }) => ({
  borderWidth: variant === "outline" ? "1px" : "0",
  borderColor: `${colorPalette}.muted`,
  borderRadius: "md",
  bg: variant === "solid" ? `${colorPalette}.solid` : "transparent",
  color: variant === "solid" ? `${colorPalette}.contrast` : `${colorPalette}.fg`,
  cursor: "pointer",
  fontSize: size === "xs" ? "xs" : "sm",
  fontWeight: "medium",
  px: size === "xs" ? 2.5 : 4,
  py: size === "xs" ? 1.5 : 2,
  whiteSpace: "nowrap",
  css: { "&:disabled": { opacity: 0.5, cursor: "not-allowed" }, "&:hover:not(:disabled)": { filter: "brightness(0.92)" } },
});
const Button = element("button", BUTTON);

const BADGE = ({ colorPalette }) => ({
  ...{ display: "inline-flex", alignItems: "center", gap: 1, px: 1.5, borderRadius: "sm", fontSize: "xs", fontWeight: "medium" },
  ...{ bg: `${colorPalette}.subtle`, color: `${colorPalette}.fg` },
});

const Opened = createContext(null);

// A menu below its button. It closes by a choice, a click elsewhere or Escape.
const MenuRoot = ({ children }) => {
  const [opened, setOpened] = useState(null);
  useEffect(() => {
    if (opened === null) return undefined;
    const close = (event) => {
      // Ignore the click that has opened the menu, which arrives here, too.
      if (event.timeStamp === opened.at || (event.type === "keydown" && event.key !== "Escape")) return;
      setOpened(null);
      opened.button.focus();
    };
    ["click", "keydown"].forEach((kind) => document.addEventListener(kind, close));
    return () => ["click", "keydown"].forEach((kind) => document.removeEventListener(kind, close));
  }, [opened]);
  return h(Opened.Provider, { value: { opened, setOpened } }, children);
};

const MenuTrigger = ({ children }) => {
  const { opened, setOpened } = useContext(Opened);
  const onClick = (event) => setOpened(opened ? null : { button: event.currentTarget, at: event.timeStamp });
  return cloneElement(children, { onClick, "aria-haspopup": "menu", "aria-expanded": opened !== null });
};

const MenuContent = ({ children }) => {
  const { opened } = useContext(Opened);
  const content = useRef(null);
  useEffect(() => content.current?.querySelector("button").focus(), [opened]);
  if (opened === null) return null;
  const { bottom, right } = opened.button.getBoundingClientRect();
  const style = { position: "fixed", top: bottom + 4, right: window.innerWidth - right, zIndex: 1500 };
  return h("div", { ref: content, role: "menu", style, className: classOf({ ...FLOATING, p: 1 }) }, children);
};

const ITEM = () => ({ display: "block", width: "100%", textAlign: "start", cursor: "pointer", px: 3, py: 1.5, fontSize: "sm" });
const Item = element("button", ITEM);

const Titled = createContext({});

// The browser keeps the focus inside a modal dialog, and Escape cancels it.
const DialogRoot = ({ role, onOpenChange, initialFocusEl, children }) =>
  h(Titled.Provider, { value: { role, onOpenChange, initialFocusEl, title: useId() } }, children);

const DialogContent = ({ children }) => {
  const { role, onOpenChange, initialFocusEl, title } = useContext(Titled);
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    initialFocusEl()?.focus();
  }, []);
  const styles = { ...FLOATING, p: 6, css: { ...FLOATING.css, margin: "10vh auto auto", width: "min(32rem, 90vw)" } };
  return h("dialog", { ref: dialog, role, "aria-labelledby": title, onCancel: onOpenChange, className: classOf(styles) }, children);
};

const Title = element("h2", () => ({ fontSize: "lg", fontWeight: "semibold" }));
const DialogTitle = (given) => h(Title, { id: useContext(Titled).title, ...given });

const CELL = () => ({ px: 3, py: 2, borderBottomWidth: "1px", textAlign: "start" });
const Bare = ({ children }) => children;

export const elements = {
  Badge: element("span", BADGE),
  Box: element("div"),
  Button,
  CloseButton: (given) => h(Button, { variant: "ghost", ...given }, "✕"),
  Code: element("code", () => ({ bg: "bg.muted", borderRadius: "sm", px: 1, fontSize: "xs", css: { fontFamily: "monospace" } })),
  Dialog: {
    Root: DialogRoot,
    Backdrop: () => null,
    Positioner: Bare,
    Content: DialogContent,
    Header: element("div", () => ({ mb: 4 })),
    Title: DialogTitle,
    Body: element("div", () => ({ fontSize: "sm" })),
    Footer: element("div", () => ({ display: "flex", gap: 3, mt: 6, css: { justifyContent: "flex-end" } })),
  },
  Heading: element("h2", ({ size }) => ({ fontSize: size ?? "lg", fontWeight: "semibold" })),
  Input: element("input", CONTROL),
  Link: element("a", () => ({ display: "inline-flex", css: { "&:hover": { textDecoration: "underline" } } })),
  Menu: { Root: MenuRoot, Trigger: MenuTrigger, Positioner: Bare, Content: MenuContent, Item: ({ value, ...rest }) => h(Item, { role: "menuitem", type: "button", ...rest }) },
  NativeSelect: { Root: element("div"), Field: element("select", () => CONTROL({ size: "sm" })), Indicator: () => null },
  Portal: ({ children }) => ReactDOM.createPortal(h(Fragment, null, children), document.body),
  Spinner: element("div", () => ({ css: { "&::before": { content: '"Loading…"' } } })),
  Table: {
    Root: element("table", () => ({ width: "100%", fontSize: "sm", css: { borderCollapse: "collapse" } })),
    Header: element("thead"),
    Body: element("tbody"),
    Row: element("tr"),
    ColumnHeader: element("th", () => ({ ...CELL(), fontWeight: "medium" })),
    Cell: element("td", CELL),
  },
  Text: element("p"),
};
